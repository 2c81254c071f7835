"""eval.py as people use it: continue after a kill, add lengths, and mistakes told in one line."""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memrl.evaluation.runner import row_key
from tests.tiny_folder import WORDS, make_folder

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "name ?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("evaluation") / "model")


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """A JSON lines file of 60 documents of up to 40 chunks, one of which cannot be read."""
    path = tmp_path_factory.mktemp("questions") / "qa.jsonl"
    rng = random.Random(0)
    with path.open("w") as file:
        for index in range(60):
            context = " ".join(rng.choices(WORDS, k=rng.randint(1, 320)))
            question = "who ? " * 9 if index == 5 else QUESTION
            line = {
                "id": f"q{index}",
                "question": question,
                "context": context,
                "answers": [rng.choice(WORDS)],
            }
            file.write(json.dumps(line) + "\n")
    return path


def run_main(capsys, *arguments) -> tuple[int, str, list[str]]:
    """eval.py's main in this process: exit code, standard output, lines on standard error."""
    try:
        code = importlib.import_module("eval").main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


def rows_in(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def test_command_adds_lengths_and_writes_every_file(folder, tmp_path, capsys):
    options = ["--model", folder, "--samples", 3, "--out", tmp_path / "out"]
    options += ["--device", "cpu", "--agent.chunk_tokens", 10]
    assert run_main(capsys, *options, "--lengths", "2,1")[0] == 0
    first = rows_in(tmp_path / "out")
    code, printed, _ = run_main(capsys, *options, "--lengths", "1,2,4")
    assert code == 0 and printed.startswith("3 documents, 12 chunks in ")
    assert len(first) == 6 and rows_in(tmp_path / "out")[:6] == first
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [(e["task"], e["length"], e["method"], e["n"]) for e in summary] == [("needle", n, "memory", 3) for n in (1, 2, 4)]
    assert (tmp_path / "out" / "accuracy.png").stat().st_size > 5000


def test_killed_command_continues_with_the_same_rows(folder, questions, tmp_path, capsys):
    options = ["--model", folder, "--task", questions, "--temperature", 1, "--max_rows", 2, "--device", "cpu"]
    code, printed, _ = run_main(capsys, *options, "--out", tmp_path / "whole")
    assert code == 0 and "failed: qa, length file, sample q5: ValueError" in printed

    out = tmp_path / "killed"
    command = [sys.executable, ROOT / "eval.py", *options, "--out", out, "--threads", 1]
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    samples = out / "samples.jsonl"
    deadline = time.monotonic() + 60
    while not (samples.exists() and samples.read_bytes().count(b"\n") >= 5) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = samples.read_bytes().count(b"\n")
    assert 5 <= before < 60
    samples.write_bytes(samples.read_bytes() + b'{"task": "qa", "len')

    code, printed, _ = run_main(capsys, *options, "--out", out)
    assert code == 0 and f"{60 - before} documents" in printed
    assert sorted(rows_in(out), key=row_key) == sorted(rows_in(tmp_path / "whole"), key=row_key)
    assert (out / "summary.json").read_text() == (tmp_path / "whole" / "summary.json").read_text()

    content = samples.read_bytes()
    code, printed, errors = run_main(capsys, *options, "--out", out)
    assert code == 0 and "results:" in printed and "documents" not in printed and errors == []
    assert samples.read_bytes() == content
    code, _, errors = run_main(capsys, *options, "--out", out, "--agent.chunk_tokens", 9)
    assert code == 2 and len(errors) == 1 and "agent.chunk_tokens (8 there, 9 now)" in errors[0]


def test_mistakes_are_one_line_and_exit_code_2(folder, questions, tmp_path, capsys):
    good = ["--model", folder, "--task", questions, "--out", tmp_path / "out"]
    for arguments, named in (
        ([], "model"),
        (["--model", tmp_path / "nowhere"], "nowhere"),
        ([*good, "--lengths", "4"], "lengths"),
        ([*good, "--samples", "0"], "samples"),
        ([*good, "--smples", "3"], "smples"),
        ([*good, "--seed", "x"], "seed"),
        ([*good, "--max_rows", "0"], "max_rows"),
        ([*good, "--top_p", "0"], "top_p"),
        ([*good, "--device", "tpu"], "device"),
        ([*good, "--device", "cuda:99"], "device"),
        ([*good, "--agent.chunk_tokens", "-1"], "chunk_tokens"),
        ([*good, "--agent.prompts", "nonsense"], "nonsense"),
        ([*good, "--out", questions], "folder"),
        (["--model", folder, "--task", "no_such_task"], "no_such_task"),
        (["--model", folder, "--task", f"{questions},{questions}"], "two tasks"),
        (["--model", folder, "--task", tmp_path / "none.jsonl"], "none.jsonl"),
        (["--model", folder, "--lengths", "4,4"], "twice"),
        (["--model", folder, "--lengths", "0"], "lengths"),
        (["--model", folder, "--lengths", ""], "lengths"),
    ):
        code, printed, errors = run_main(capsys, *arguments)
        assert (code, len(errors), printed) == (2, 1, ""), (arguments, errors)
        assert named in errors[0], (arguments, errors)


def test_help_needs_neither_torch_nor_transformers():
    code = """import sys
for name in ("eval", "infer"):
    try:
        __import__(name).main(["--help"])
    except SystemExit:
        print("torch" in sys.modules, "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert [line for line in done.stdout.splitlines() if line[:5] in ("True ", "False")] == ["False False"] * 2
    assert "--lengths" in done.stdout and "--trace" in done.stdout
