"""The settings that the rows of a results folder depend on: saved beside them, and compared when a later command adds rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memrl.config import flatten
from memrl.reading.open_model import decoding, model_settings
from memrl.utils.files import fingerprint as fingerprint_files

if TYPE_CHECKING:
    from memrl.evaluation.methods import Method
    from memrl.evaluation.model_under_test import ModelUnderTest
    from memrl.evaluation.tasks import Task

FORMAT = 2  # of the rows; format 1 had neither method nor repeat
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
# A later command may add tasks and methods; a model folder may move, and a server may start again elsewhere.
_ADDITIVE, _NOT_COMPARED = ("tasks", "methods"), ("model_path", "endpoint")


def fingerprint(model: ModelUnderTest, seed: int, tasks: Mapping[str, Task], methods: Mapping[str, Method]) -> dict[str, Any]:
    """Everything that a row depends on, as JSON; weights and tokenizer enter by the hash of their files."""
    tokenizer = [model.tokenizer_folder / name for name in _TOKENIZER_FILES]
    return {
        "format": FORMAT,
        "model": model.label,
        **_source(model),
        "tokenizer": fingerprint_files([path for path in tokenizer if path.is_file()]),
        "decoding": asdict(decoding(model.reader)),
        "seed": seed,
        "methods": {name: method.settings() for name, method in methods.items()},
        "tasks": {name: task.version for name, task in tasks.items()},
    }


def _source(model: ModelUnderTest) -> dict[str, Any]:
    if model.endpoint is not None:
        return {"endpoint": model.endpoint, "served_model": model.name}
    folder = Path(model.name)
    weights = fingerprint_files(sorted(folder.glob("*.safetensors")))
    return {"model_path": str(folder.resolve()), "weights": weights, **model_settings(model.reader)}


def join(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a folder after a command adds rows to it: the old ones with the added tasks and methods.

    Raises:
        ValueError: rows of an earlier format, or a common setting that differs.
    """
    if old.get("format") != new.get("format"):
        formats = f"{old.get('format', 1)} there, {new.get('format')} now"
        raise ValueError(
            f"{folder} holds results in another format ({formats}), to which no rows can be added; give another --out"
        )
    added = {name: {**old.get(name, {}), **new.get(name, {})} for name in _ADDITIVE}
    before, now = _compared(old, new), _compared(new, old)
    differ = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if differ:
        shown = ", ".join(f"{key} ({_short(before.get(key))} there, {_short(now.get(key))} now)" for key in differ)
        raise ValueError(f"{folder} holds results made with other settings: {shown}; give another --out, or the same settings")
    return {**new, **added}


def _compared(mine: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in mine.items() if name not in (*_ADDITIVE, *_NOT_COMPARED)}
    for name in _ADDITIVE:
        kept[name] = {key: value for key, value in mine.get(name, {}).items() if key in other.get(name, {})}
    return flatten(kept)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
