"""Results folders read back for the report: one series per model and method, every reading once.

A folder may still be being written. Its rows may stand in one file or in one per process (`samples*.jsonl`), and its last lines
may be torn. What one model did on some tasks in one folder and on others in another is one series.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memrl.evaluation.results import CONFIG_FILE
from memrl.evaluation.tasks import Length
from memrl.scoring.scores import SCORES
from memrl.utils.journal import read_records

_NEEDED = (
    *("model", "method", "task", "length", "index", "repeat", "id", "question", "answers", "answer", *SCORES),
    *("chunks", "tokens", "prompt_tokens", "response_tokens", "seconds", "peak_gib", "depths", "held", "chunk_tokens", "error"),
)
_GENERIC = ("model", "best")  # what train.py calls every model that it writes; the run's name says more

Row = dict[str, Any]
Cell = tuple[str, Length]


@dataclass
class Series:
    """What one method did with one model: a line of every table and of every picture.

    Attributes:
        label: unique among the series of a report.
        folders: those that the rows are from; more than one where folders of one model and method share no task and length.
        rows: the readings by (task, length), each list ordered by index and repeat; without prompts, responses and memories.
        versions: of the tasks, by name, as the folder's settings give them.
        settings: what the answers depend on besides the tasks, as JSON; empty where the folder does not say so.
    """

    label: str
    folders: tuple[Path, ...]
    model: str
    method: str
    rows: dict[Cell, list[Row]] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    settings: str = ""


def read_series(folders: Sequence[str | Path]) -> list[Series]:
    """All series of the folders, in their order, methods in the order of the folder's settings.

    Of two rows about one reading the later counts, but a failure never replaces an answer. Series of one model and method with
    the same settings and versions of tasks are joined, unless a task and length stands in several of them.

    Raises:
        ValueError: no such folder, one given twice, no rows, a damaged line, or rows of an earlier format; names the file.
    """
    found: list[Series] = []
    paths = [Path(folder) for folder in folders]
    for path in paths:
        if sum(other.resolve() == path.resolve() for other in paths) > 1:
            raise ValueError(f"{path} is given twice; give each results folder once")
        found += _read_folder(path)
    found = _joined(found)
    for series, label in zip(found, unique_labels(found), strict=True):
        series.label = label
    return found


def unique_labels(series: Sequence[Series]) -> list[str]:
    """The model, and the method where there are several; where that is not unique the folder's name as well, or its path."""
    has_methods = len({one.method for one in series}) > 1

    def name(one: Series) -> str:
        return f"{one.model} {one.method}" if has_methods else one.model

    forms = (
        name,
        lambda one: f"{name(one)} ({' + '.join(folder.name for folder in one.folders)})",
        lambda one: f"{name(one)} ({' + '.join(folder.as_posix() for folder in one.folders)})",
    )
    labels = []
    for one in series:
        for form in forms:
            if [form(other) for other in series].count(form(one)) == 1:
                break
        labels.append(form(one))
    return labels


def _joined(found: Sequence[Series]) -> list[Series]:
    groups: dict[tuple, list[Series]] = {}
    for number, one in enumerate(found):
        # Without settings nobody knows whether two folders hold the same model's answers.
        key = (one.model, one.method, one.settings) if one.settings else (number,)
        groups.setdefault(key, []).append(one)
    result = []
    for group in groups.values():
        cells = [cell for one in group for cell in one.rows]
        versions = {(task, json.dumps(version)) for one in group for task, version in one.versions.items()}
        if len(set(cells)) < len(cells) or len({task for task, _ in versions}) < len(versions):
            result += group
            continue
        rows = {cell: rows for one in group for cell, rows in one.rows.items()}
        first = group[0]
        first.rows = {cell: rows[cell] for cell in sorted(rows, key=cell_order)}
        first.folders = tuple(folder for one in group for folder in one.folders)
        first.versions = {task: version for one in group for task, version in one.versions.items()}
        result.append(first)
    return result


def _read_folder(folder: Path) -> list[Series]:
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; give a results folder of eval.py")
    files = sorted(folder.glob("samples*.jsonl"))
    if not files:
        raise ValueError(f"{folder} holds no samples.jsonl; give a results folder of eval.py")
    readings: dict[tuple, Row] = {}
    for path in files:
        for number, record in read_records(path):
            row = _checked(record, f"{path}, line {number}")
            key = tuple(row[name] for name in ("model", "method", "task", "length", "index", "repeat"))
            if key not in readings or row["error"] is None or readings[key]["error"] is not None:
                readings[key] = row
    if not readings:
        raise ValueError(f"{folder} holds no rows yet; let eval.py finish a document first")
    config = _read_config(folder)
    series: dict[tuple[str, str], Series] = {}
    for row in readings.values():
        identity = row["model"], row["method"]
        if identity not in series:
            series[identity] = _new_series(folder, row, config)
        series[identity].rows.setdefault((row["task"], row["length"]), []).append(row)
    for one in series.values():
        one.rows = {cell: sorted(one.rows[cell], key=_order) for cell in sorted(one.rows, key=cell_order)}
    order = list(_mapping(config, "methods"))
    return sorted(series.values(), key=lambda one: order.index(one.method) if one.method in order else len(order))


def _new_series(folder: Path, row: Row, config: Mapping[str, Any]) -> Series:
    methods = _mapping(config, "methods")
    # Where the model is makes no difference to its answers.
    shared = {name: value for name, value in config.items() if name not in ("tasks", "methods", "model_path", "endpoint")}
    settings = json.dumps([shared, methods[row["method"]]], sort_keys=True) if row["method"] in methods else ""
    model = _model_name(row["model"], config)
    return Series("", (folder,), model, row["method"], versions=_mapping(config, "tasks"), settings=settings)


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def cell_order(cell: Cell) -> tuple:
    """Tasks by name, lengths by size; lengths that are no number last."""
    task, length = cell
    return task, isinstance(length, str), length


def _order(row: Row) -> tuple[int, int]:
    return row["index"], row["repeat"]


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        raise ValueError(f"{folder / CONFIG_FILE} is not JSON; run eval.py into a folder of its own") from None
    return config if isinstance(config, dict) else {}


def _model_name(model: str, config: Mapping[str, Any]) -> str:
    path = Path(str(config.get("model_path") or model))
    if model in _GENERIC and path.name == model and path.parent.name:
        return f"{path.parent.name}/{model}"
    return model


def _checked(record: Row, where: str) -> Row:
    missing = [name for name in _NEEDED if name not in record]
    if missing:
        raise ValueError(f"{where} has no {missing[0]!r}: rows of an earlier format; run eval.py again into another --out")
    row = {name: record[name] for name in _NEEDED}
    is_number = {name: isinstance(row[name], int | float) for name in (*SCORES, "chunks", "tokens", "index", "repeat")}
    is_text = {name: isinstance(row[name], str) for name in ("model", "method", "task", "held", "answer")}
    is_list = {name: isinstance(row[name], list) for name in ("answers", "depths")}
    is_length = {"length": isinstance(row["length"], int | str)}
    for name, is_right in (is_number | is_text | is_list | is_length).items():
        if not is_right:
            raise ValueError(f"{where}: {name} is {json.dumps(row[name])[:60]}; eval.py does not write that")
    return row
