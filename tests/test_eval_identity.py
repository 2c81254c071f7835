"""Rows of one results folder come from one model and one text of each document: anything else is refused by name."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from memrl.commands import eval as command
from tests.tiny_folder import make_folder

QUESTION = {"question": "name ?", "answers": ["red"]}


def evaluate(*arguments) -> int:
    try:
        return command.main([*map(str, arguments), "--device", "cpu", "--threads", "1"])
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A model, a data set with a document in a file of its own, and the results of one question."""
    root = tmp_path_factory.mktemp("identity")
    make_folder(root / "model")
    (root / "model" / "generation_config.json").write_text('{"eos_token_id": 3}')
    (root / "red.txt").write_text("red fox. " * 3)
    lines = [QUESTION | {"file": "red.txt"}, QUESTION | {"context": "blue stone"}]
    (root / "qa.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert evaluate("--model", root / "model", "--task", root / "qa.jsonl", "--out", root / "out", "--samples", 1) == 0
    return root


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


CHANGES = {
    "config.rope.theta": lambda root: edit_json(root / "model/config.json", rope_theta=20_000.0),
    "config.rms_norm_eps": lambda root: edit_json(root / "model/config.json", rms_norm_eps=1e-3),
    "config.rope.kind": lambda root: edit_json(root / "model/config.json", rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "dtype": lambda root: edit_json(root / "model/config.json", torch_dtype="bfloat16"),
    "stop_ids": lambda root: edit_json(root / "model/generation_config.json", eos_token_id=[3, 7]),
    "chat_template": lambda root: (root / "model/chat_template.jinja").write_text("{{ messages[0].content }} <|im_start|>"),
    "tokenizer": lambda root: edit_json(root / "model/tokenizer_config.json", extra=1),
    "weights": lambda root: edit_weights(root / "model"),
    "methods.memory.memory_tokens": lambda root: _replace(
        root / "model/memrl_agent.yaml", "memory_tokens: 4", "memory_tokens: 5"
    ),
    "methods.memory.prompts.answer": lambda root: _replace(root / "model/memrl_agent.yaml", "answer: A Q", "answer: A A Q"),
    "tasks.qa": lambda root: (root / "red.txt").write_text("blue fox. " * 3),  # only the document that the data set names
}


def _replace(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_or_document_is_refused_by_name(measured, tmp_path, name, capsys):
    root = shutil.copytree(measured, tmp_path / "root")
    arguments = ["--model", root / "model", "--task", root / "qa.jsonl", "--out", root / "out"]
    CHANGES[name](root)
    before = {path.name: path.read_bytes() for path in (root / "out").iterdir()}
    assert evaluate(*arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert f" {name} (" in error and error.endswith("; give another --out, or the same settings")
    assert {path.name: path.read_bytes() for path in (root / "out").iterdir()} == before


def test_the_same_model_elsewhere_continues(measured, tmp_path, capsys):
    root = shutil.copytree(measured, tmp_path / "root")
    arguments = ["--model", root / "model", "--task", root / "qa.jsonl", "--out", root / "out", "--label", "model"]
    edit_json(root / "model/config.json", initializer_range=0.5, transformers_version="9")  # of no use to a trained model
    config = json.loads((root / "out/eval_config.json").read_text())
    assert evaluate(*arguments[:-1], config["model"]) == 0
    assert len((root / "out/samples.jsonl").read_text().splitlines()) == 2
    capsys.readouterr()
    assert evaluate(*arguments[:-1], config["model"], "--dtype", "bfloat16") == 2
    assert " dtype (" in capsys.readouterr().err


def test_an_endpoint_is_known_by_name_and_tokenizer_and_no_key_is_saved(measured, tmp_path):
    from memrl.evaluation.eval_settings import fingerprint
    from memrl.evaluation.model_under_test import read_model_settings
    from memrl.evaluation.options import Options
    from memrl.reading.open_model import ReaderOptions

    options = Options("served", endpoint="https://user:KEY1@host:8000/v1?api-key=KEY2", tokenizer=str(measured / "model"))
    settings = fingerprint(read_model_settings(options, ReaderOptions()), 0, {}, {})
    assert settings["endpoint"] == "https://host:8000/v1" and settings["served_model"] == "served"
    assert "KEY" not in json.dumps(settings) and {"tokenizer", "chat_template", "stop_ids"} <= settings.keys()
