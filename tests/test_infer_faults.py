"""infer.py with outputs that cannot be written or must not be, files of all kinds, panics, NaN, and signals."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from memrl.commands.infer import main
from memrl.reading.text_files import read_text
from memrl.tokenizer import Tokenizer
from memrl.utils.process import StopSignals, run_command
from tests.test_infer_cli import ROOT, Q, folder, infer, text_file  # noqa: F401 (fixtures)


@pytest.fixture
def short(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("red blue")
    return path


# --- what is the user's stays ------------------------------------------------------------------------------------------------


def test_no_output_overwrites_what_is_read_another_output_or_the_model(infer, folder, short, tmp_path, monkeypatch):  # noqa: F811
    before = {path: path.read_bytes() for path in (short, *folder.iterdir())}
    prompts = tmp_path / "prompts.yaml"
    prompts.write_bytes((folder / "memrl_agent.yaml").read_bytes())
    os.link(short, tmp_path / "hard.txt")
    (tmp_path / "soft.txt").symlink_to(short)
    (tmp_path / "there").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    inputs = [short, "short.txt", "hard.txt", "soft.txt", "there/short.txt", "there/../" + tmp_path.name + "/short.txt"]
    cases = [(option, path) for option in ("--json", "--trace") for path in inputs]
    cases += [("--json", folder / name) for name in ("config.json", "model.safetensors", "memrl_agent.yaml")]
    cases += [("--json", "new", "--trace", name) for name in ("new", "./new", tmp_path / "new", "there/new")]
    cases += [("--json", prompts, "--agent.prompts", prompts)]
    for options in cases:
        code, printed, errors = infer(short, "-q", Q, *options)
        assert (code, printed, len(errors)) == (2, "", 1) and "choose another name" in errors[0], (options, errors)
    assert {path: path.read_bytes() for path in before} == before and not (tmp_path / "new").exists()


@pytest.mark.parametrize("option", ["--json", "--trace"])
def test_a_file_of_another_kind_is_not_replaced(infer, short, tmp_path, option):  # noqa: F811
    (tmp_path / "notes").write_text('{"question": "mine"}\n')
    code, _, errors = infer(short, "-q", Q, option, tmp_path / "notes")
    assert code == 2 and "notes: exists and was not written by this command" in errors[-1]
    assert (tmp_path / "notes").read_text() == '{"question": "mine"}\n'


def test_a_file_that_standard_output_goes_to_is_no_place_for_the_json_too(folder, short, tmp_path):  # noqa: F811
    with open(tmp_path / "out.txt", "w") as out:
        saved = os.dup(1)
        os.dup2(out.fileno(), 1)
        try:
            with pytest.raises(SystemExit):
                main([str(short), "-q", Q, "--model", str(folder), "--json", "/dev/stdout"])
        finally:
            os.dup2(saved, 1)
            os.close(saved)


# --- standard output ---------------------------------------------------------------------------------------------------------


def run_with(stdout: io.TextIOWrapper, monkeypatch, command) -> int:
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stdout)
        return run_command(command)


def test_standard_output_that_cannot_be_written_ends_in_one_line(monkeypatch, capsys):
    def prints() -> int:
        print("x" * 20_000)
        return 0

    def fails() -> int:
        print("x")
        sys.exit(0)

    reader, writer = os.pipe()
    os.close(reader)
    for command in (prints, fails, lambda: print("red") or 0):
        for descriptor, reason in (
            (os.open("/dev/full", os.O_WRONLY), "No space left on device"),
            (os.dup(writer), "Broken pipe"),
        ):
            for buffering in (-1, 1):
                with open(os.dup(descriptor), "w", buffering=buffering) as stdout:
                    assert run_with(stdout, monkeypatch, command) == 1
                    assert capsys.readouterr().err.splitlines() == [f"error: standard output cannot be written: {reason}"]
            os.close(descriptor)
    os.close(writer)


def test_commands_keep_their_output_and_code_and_streams(monkeypatch, capsys):
    stdout = io.TextIOWrapper(io.BytesIO(), "ascii")
    assert run_with(stdout, monkeypatch, lambda: print("r\xe9d \udcff") or 7) == 7
    assert stdout.buffer.getvalue() == b"r?d ?\n"

    def interrupted() -> int:
        raise KeyboardInterrupt

    assert run_with(stdout, monkeypatch, interrupted) == 130
    with pytest.raises(SystemExit):
        run_with(stdout, monkeypatch, lambda: sys.exit(3))
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", None)
        assert run_command(lambda: 0) == 2
    assert capsys.readouterr().err.splitlines() == ["error: standard output is closed; send it to a file or to /dev/null"]


def test_a_full_log_does_not_end_the_work(monkeypatch):
    with open("/dev/full", "w", buffering=1) as full, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", full)
        assert run_command(lambda: print("red", file=sys.stderr, flush=True) or 0) == 0
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_closed_pipe_ends_a_real_command_in_one_line():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "memrl", "--help"]
    process = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60)
    assert (process.returncode, process.stderr) == (1, "error: standard output cannot be written: Broken pipe\n")
    os.close(writer)


# --- signals -----------------------------------------------------------------------------------------------------------------


def test_sigterm_is_an_interrupt_with_its_own_number():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)  # the same request, which reached the process twice
        time.sleep(0.01)
    assert stop.number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == before


def test_a_second_signal_ends_the_process_at_once():
    script = """
import os, signal, time
from memrl.utils.process import StopSignals
with StopSignals() as stop:
    try:
        os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGINT); time.sleep(5)
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60).returncode == 130


# --- questions and documents -------------------------------------------------------------------------------------------------


def test_a_question_that_is_no_utf8_is_one_line_without_escapes(infer, short):  # noqa: F811
    for question in ("caf\udce9", "\udc1b[2J"):
        code, printed, errors = infer(short, "-q", question)
        assert (code, printed, len(errors)) == (2, "", 1)
        assert "is not UTF-8 text" in errors[0] and errors[0].isprintable()


def test_devices_sockets_silent_pipes_and_endless_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("memrl.reading.text_files.PIPE_S", 0.05)
    os.mkfifo(tmp_path / "fifo")
    os.mkfifo(tmp_path / "silent")
    talker = os.open(tmp_path / "silent", os.O_RDWR)  # opened for writing, and nothing is written
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        cases = dict.fromkeys(("/dev/zero", "/dev/full", "/dev/urandom"), "is a device; give a file")
        cases |= dict.fromkeys((tmp_path / "fifo", tmp_path / "silent"), r"is a pipe through which nothing came for 0\.05 s")
        cases |= {tmp_path / "socket": "cannot be read", tmp_path: "is a folder"}
        for path, words in cases.items():
            with pytest.raises(ValueError, match=words):
                read_text(path)
    os.close(talker)
    monkeypatch.setattr("memrl.reading.text_files.LARGEST_TEXT", 2**20)
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2**21)
    with pytest.raises(ValueError, match="larger than 1 MiB; cut it"):
        read_text(tmp_path / "huge")


def test_a_pipe_that_a_program_writes_to_is_read(tmp_path):
    reader, writer = os.pipe()

    def write():
        for part in (b"red ", b"blue\r\n"):
            time.sleep(0.02)
            os.write(writer, part)
        os.close(writer)

    threading.Thread(target=write).start()
    assert read_text(f"/dev/fd/{reader}") == "red blue\n"
    os.close(reader)


def test_names_and_texts_with_escapes_reach_no_terminal(infer, tmp_path):  # noqa: F811
    names = ["a\x1b[2Jb\nc.txt", "d\udcff.txt"]
    for name in names:
        code, printed, errors = infer(tmp_path / name, "-q", Q)
        assert (code, printed, len(errors)) == (2, "", 1) and errors[0].isprintable()
        (tmp_path / name).write_text("red \x1b[31mblue\x1b]0;title\x07 " * 20)
    code, printed, errors = infer(*[tmp_path / name for name in names], "-q", "name \x1b[2J ?")
    assert code == 0 and all(line.isprintable() for line in printed.splitlines() + errors)
    assert r"a\x1b[2Jb c.txt" in printed and r"question: name \x1b[2J ?" in printed


def test_a_document_that_the_tokenizer_panics_at_fails_alone(infer, short, tmp_path, monkeypatch):  # noqa: F811
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    encode = Tokenizer.encode

    def panics(self, text):
        if "poison" in text:
            raise panic("index out\nof range \x1b")
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", panics)
    (tmp_path / "poison.txt").write_text("poison " * 9)
    out = tmp_path / "answers.json"
    code, printed, _ = infer(tmp_path / "poison.txt", short, "-q", Q, "--json", out)
    poisoned, read = json.loads(out.read_text())
    assert code == 1 and "failed: PanicException: index out\n" in printed
    assert poisoned["error"] == "PanicException: index out" and "error" not in read


def test_outputs_of_the_model_that_are_nan_fail_the_reading_in_one_line(infer, short, monkeypatch):  # noqa: F811
    from memrl.model import Transformer

    forward = Transformer.forward
    monkeypatch.setattr(Transformer, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs) * torch.nan)
    code, printed, _ = infer(short, "-q", Q)
    assert code == 1 and "failed: ValueError: outputs of the model are NaN or infinite" in printed
