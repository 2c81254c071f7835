"""The settings that the rows of a results folder depend on: saved beside them, and compared when a later command adds rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memrl.config import flatten
from memrl.reading.model_identity import model_identity, tokenizer_identity
from memrl.reading.open_model import decoding
from memrl.utils.plain_text import printable

if TYPE_CHECKING:
    from memrl.evaluation.methods import Method
    from memrl.evaluation.model_under_test import ModelUnderTest
    from memrl.evaluation.tasks import Task

FORMAT = 3  # of the rows, their prompts and scores: raise it when equal settings no longer give equal rows
# A later command may add tasks and methods; a model folder may move, and a server may start again elsewhere.
_ADDITIVE, _NOT_COMPARED = ("tasks", "methods"), {"model_path", "endpoint"}


def fingerprint(model: ModelUnderTest, seed: int, tasks: Mapping[str, Task], methods: Mapping[str, Method]) -> dict[str, Any]:
    """Everything that a row depends on, as JSON: the one place where the identity of an evaluation is computed."""
    if model.endpoint is not None:
        from memrl.endpoint.addresses import public_url

        source = {"endpoint": public_url(model.endpoint), "served_model": model.name}
        source |= tokenizer_identity(model.tokenizer_folder, model.tokenizer)
    else:
        source = {"model_path": str(Path(model.name).resolve()), **model_identity(model.name, model.reader, model.tokenizer)}
    return {
        "format": FORMAT,
        "model": model.label,
        **source,
        "decoding": asdict(decoding(model.reader)),
        "seed": seed,
        "methods": {name: method.settings() for name, method in methods.items()},
        "tasks": {name: task.version for name, task in tasks.items()},
    }


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
    # Of the additive settings only those in the folder are compared; what the command leaves out stays as it is.
    common = {name: {key: new[name].get(key, value) for key, value in old.get(name, {}).items()} for name in _ADDITIVE}
    before, now = flatten(dict(old)), flatten({**new, **common})
    differ = [key for key in sorted((before.keys() | now.keys()) - _NOT_COMPARED) if before.get(key) != now.get(key)]
    if differ:
        shown = ", ".join(f"{printable(key)} ({_short(before.get(key))} there, {_short(now.get(key))} now)" for key in differ)
        raise ValueError(f"{folder} holds results made with other settings: {shown}; give another --out, or the same settings")
    return {**new, **{name: {**old.get(name, {}), **new[name]} for name in _ADDITIVE}}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
