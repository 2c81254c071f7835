"""Documents that a data set names by `file`: only from below its folder, never a pipe or a device, and the option for others."""

import json
import os
import socket
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memrl.__main__ import main
from memrl.agents import AgentConfig
from memrl.config import DataOptions, ValidationOptions
from memrl.data import load_samples, rows
from memrl.data.training_source import FileSource
from memrl.evaluation.tasks import make_tasks
from memrl.prompts import load_prompts
from memrl.training.inputs import make_source
from memrl.training.validation import validation_samples

ROW = {"question": "Who?", "answers": ["Ed"]}


@dataclass
class Folders:
    """A data set's folder, a secret beside it, and how rows may name the secret."""

    inside: object
    secret: object

    def data(self, name, kind="jsonl"):
        path = self.inside / f"data.{kind}"
        row = {**ROW, "file": str(name)}
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist([row]), path)
        else:
            path.write_text(json.dumps(row) + "\n")
        return path


@pytest.fixture
def folders(tmp_path):
    inside = tmp_path / "set"
    (inside / "texts").mkdir(parents=True)
    (inside / "texts" / "own.txt").write_text("Ed did.")
    (tmp_path / "secret.txt").write_text("root:x:0")
    (inside / "link.txt").symlink_to(tmp_path / "secret.txt")
    (inside / "linked").symlink_to(tmp_path)
    return Folders(inside, tmp_path / "secret.txt")


OUTSIDE = ["../secret.txt", "texts/../../secret.txt", "link.txt", "linked/secret.txt", "absolute"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_file_outside_the_folder_is_read_only_if_that_is_allowed(folders, name, kind):
    path = folders.data(folders.secret if name == "absolute" else name, kind)
    with pytest.raises(ValueError) as caught:
        load_samples(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {'line' if kind == 'jsonl' else 'row'} 1: file: ") and "\n" not in message
    assert "outside the data set's folder" in message and "--allow_files" in message and "data.allow_files" in message
    assert load_samples(path, allow_files=True)[0].context == "root:x:0"


def test_a_file_below_the_folder_is_read_also_by_links_that_stay_there(folders):
    (folders.inside / "inner.txt").symlink_to(folders.inside / "texts" / "own.txt")
    for name in ("texts/own.txt", "texts/../texts/own.txt", "inner.txt", folders.inside / "texts" / "own.txt"):
        assert load_samples(folders.data(name))[0].context == "Ed did."


def test_a_data_set_whose_folder_is_a_link_finds_its_files(folders, tmp_path):
    folders.data("texts/own.txt")
    (tmp_path / "other").symlink_to(folders.inside)
    assert load_samples(tmp_path / "other" / "data.jsonl")[0].context == "Ed did."


def test_a_link_that_turns_outwards_while_a_run_reads_is_refused(folders):
    (folders.inside / "a.txt").symlink_to("texts/own.txt")
    samples = load_samples(folders.data("a.txt"))
    assert samples[0].context == "Ed did."
    (folders.inside / "a.txt").unlink()
    (folders.inside / "a.txt").symlink_to(folders.secret)
    with pytest.raises(ValueError, match="outside the data set's folder"):
        samples[0]


def test_what_is_no_text_file_is_refused_at_once(folders, monkeypatch):
    os.mkfifo(folders.inside / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folders.inside / "socket"))
    (folders.inside / "loop").symlink_to("loop")
    (folders.inside / "long.txt").write_text("x" * 101)
    monkeypatch.setattr(rows, "MOST_BYTES", 100)
    for name in ("pipe", "/dev/zero", "/dev/stdin", "socket", "texts", "loop", "long.txt", "x" * 300, "a\0b", "none.txt"):
        path = folders.data(name)
        with pytest.raises(ValueError) as caught:
            load_samples(path, allow_files=True)
        assert str(caught.value).startswith(f"{path}: line 1: file: ") and "\n" not in str(caught.value)


def test_line_ends_and_a_byte_order_mark_are_those_of_text(folders):
    (folders.inside / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert load_samples(folders.data("a.txt"))[0].context == "one\ntwo\nthree\n"


# --- the option arrives -------------------------------------------------------------------------------------


def test_allow_files_reaches_training_and_validation(folders):
    path = str(folders.data("link.txt"))
    data = DataOptions(path=path, allow_files=True)
    source = make_source(data, 1, 0)
    assert isinstance(source, FileSource) and source.sample(0, 0).context == "root:x:0"
    assert validation_samples(ValidationOptions(path=path), data, 0)[0].context == "root:x:0"
    refusing = DataOptions(path=path)
    assert not refusing.allow_files
    with pytest.raises(ValueError, match="outside"):
        make_source(refusing, 1, 0)
    with pytest.raises(ValueError, match="outside"):
        validation_samples(ValidationOptions(path=path), refusing, 0)


def test_allow_files_reaches_the_tasks_of_an_evaluation(folders, tokenizer_of_words, monkeypatch):
    path = str(folders.data("link.txt"))
    agent = AgentConfig(load_prompts("question_first"))
    (task,) = make_tasks([path], tokenizer_of_words, agent, allow_files=True)
    assert task.sample("file", 0, 0).context == "root:x:0"
    with pytest.raises(ValueError, match="outside"):
        make_tasks([path], tokenizer_of_words, agent)


@pytest.mark.parametrize("words", [[], ["--allow_files"]])
def test_allow_files_reaches_eval(words, folders, tokenizer_of_words, monkeypatch, capsys):
    import importlib

    from memrl.evaluation import evaluation_run

    given = []

    def note(names, tokenizer, agent, files, allow_files):
        given.append(allow_files)
        raise ValueError("far enough")

    class Model:
        tokenizer, agent = tokenizer_of_words, AgentConfig(load_prompts("question_first"))

    monkeypatch.setattr(evaluation_run, "read_model_settings", lambda options, reader: Model)
    monkeypatch.setattr(evaluation_run, "make_methods", lambda *arguments: {})
    monkeypatch.setattr(evaluation_run, "make_tasks", note)
    command = importlib.import_module("memrl.commands.eval")
    with pytest.raises(SystemExit):
        command.main(["--model", "m", "--endpoint", "http://localhost:1/v1", *words])
    assert given == [bool(words)] and "far enough" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "convert", "filter"])
def test_allow_files_reaches_the_data_commands(command, folders, tmp_path, capsys, monkeypatch):
    path = folders.data("link.txt")
    arguments = {"check": [path], "convert": [path, "--out", tmp_path / "out.jsonl"]}
    arguments["filter"] = [path, tmp_path / "out.jsonl", "--model", tmp_path]
    monkeypatch.setattr("memrl.commands.filter_dataset.asked_of", lambda options: {})
    monkeypatch.setattr("memrl.commands.filter_dataset.open_model", refuse_model)

    def run(*more):
        try:
            return main(["data", command, *map(str, arguments[command]), *more]), capsys.readouterr()
        except SystemExit as stop:
            return stop.code, capsys.readouterr()

    code, output = run()
    assert code == 2 and "outside the data set's folder" in output.err
    code, output = run("--allow_files")
    assert "outside" not in output.err and (code == 0 or "asked the model" in output.err)


def refuse_model(options):
    raise ValueError("asked the model")


@pytest.fixture
def tokenizer_of_words():
    from memrl.data.needle import build_tokenizer
    from memrl.tokenizer import Tokenizer

    return Tokenizer(build_tokenizer())
