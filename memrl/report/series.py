"""Read results folders for the report: one series per model and method, every reading once.

A folder may still be being written: rows are in one file or in one per process (`samples*.jsonl`), and last lines may be cut
off. Folders with the same model, method and settings but different tasks or lengths become one series.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memrl.evaluation.results import CONFIG_FILE, read_config
from memrl.evaluation.row_check import check_row
from memrl.evaluation.tasks import Length
from memrl.utils.journal import read_records

MOST_SERIES = 100  # and tasks; a report of more is no comparison, and its pictures would not end
Row = dict[str, Any]
Cell = tuple[str, Length]


@dataclass
class Series:
    """The readings of one model with one method: a line of every table and of every picture."""

    label: str  # unique among the series of a report
    folders: tuple[Path, ...]
    model: str
    method: str
    rows: dict[Cell, list[Row]] = field(default_factory=dict)  # by index and repeat; without prompts, responses and memories
    versions: Mapping[str, Any] = field(default_factory=dict)  # of the tasks, from the folder's settings
    settings: str = ""  # what the answers depend on besides the tasks, as JSON; empty where the folder does not record it


def cell_order(cell: Cell) -> tuple:
    """Sort key: tasks by name, lengths by size, then lengths that are names."""
    task, length = cell
    return task, isinstance(length, str), length


def sort_lengths(lengths: Iterable[Length]) -> list[Length]:
    return sorted(set(lengths), key=lambda length: cell_order(("", length)))


def read_series(folders: Sequence[str | Path]) -> list[Series]:
    """All series of the folders, in their order, methods in the order of the folder's settings.

    Of two rows of one reading the later counts, but a failure never replaces an answer. Series of one model and method with
    the same settings and versions of tasks are joined, unless they have a task and length in common.

    Raises:
        ValueError: no such folder, a folder given twice, no rows, a damaged line, or rows of an earlier format; names the file.
    """
    paths = [Path(folder) for folder in folders]
    for path in paths:
        if sum(other.resolve() == path.resolve() for other in paths) > 1:
            raise ValueError(f"{path} is given twice; give each results folder once")
    found = _join([series for path in paths for series in _read_folder(path)])
    for series, label in zip(found, _unique_labels(found), strict=True):
        series.label = label
    return found


def _unique_labels(series: Sequence[Series]) -> list[str]:
    """The model, the method where there are several, and where that is not unique the folders' names or else their paths."""
    has_methods = len({one.method for one in series}) > 1
    names = [f"{one.model} {one.method}" if has_methods else one.model for one in series]
    folders = [" + ".join(folder.name for folder in one.folders) for one in series]
    paths = [" + ".join(folder.as_posix() for folder in one.folders) for one in series]
    forms = [names, *([f"{name} ({place})" for name, place in zip(names, places, strict=True)] for places in (folders, paths))]
    return [next((form[k] for form in forms if form.count(form[k]) == 1), forms[-1][k]) for k in range(len(series))]


def _join(found: Sequence[Series]) -> list[Series]:
    groups: dict[tuple, list[Series]] = {}
    for number, one in enumerate(found):
        # Without recorded settings two folders may hold answers of different models.
        key = (one.model, one.method, one.settings) if one.settings else (number,)
        groups.setdefault(key, []).append(one)
    result = []
    for group in groups.values():
        rows = {cell: rows for one in group for cell, rows in one.rows.items()}
        versions = {task: version for one in group for task, version in one.versions.items()}
        has_common_cell = len(rows) < sum(len(one.rows) for one in group)
        if has_common_cell or any(versions[task] != one.versions[task] for one in group for task in one.versions):
            result += group
        else:
            folders = tuple(folder for one in group for folder in one.folders)
            rows = {cell: rows[cell] for cell in sorted(rows, key=cell_order)}
            result.append(replace(group[0], folders=folders, rows=rows, versions=versions))
    return result


def _read_folder(folder: Path) -> list[Series]:
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; give a results folder of `memrl eval`")
    files = sorted(folder.glob("samples*.jsonl"))
    if not files:
        raise ValueError(f"{folder} holds no samples.jsonl; give a results folder of `memrl eval`")
    readings: dict[tuple, Row] = {}
    for path in files:
        for number, record in read_records(path):
            try:
                row = check_row(record)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} {error}") from None
            key = tuple(row[name] for name in ("model", "method", "task", "length", "index", "repeat"))
            if key not in readings or row["error"] is None or readings[key]["error"] is not None:
                readings[key] = row
    if not readings:
        raise ValueError(f"{folder} holds no rows yet; wait until `memrl eval` has finished a document")
    for name in ("model", "task"):
        if (count := len({row[name] for row in readings.values()})) > MOST_SERIES:
            raise ValueError(f"{folder} holds rows of {count} {name}s; a report compares at most {MOST_SERIES}")
    config = read_config(folder) if (folder / CONFIG_FILE).exists() else {}
    series = {(model, method): _new_series(folder, model, method, config) for model, method, *_ in readings}
    rows = sorted(readings.values(), key=lambda row: (row["index"], row["repeat"]))
    for row in sorted(rows, key=lambda row: cell_order((row["task"], row["length"]))):
        series[row["model"], row["method"]].rows.setdefault((row["task"], row["length"]), []).append(row)
    order = list(config.get("methods", {}))
    return sorted(series.values(), key=lambda one: order.index(one.method) if one.method in order else len(order))


def _new_series(folder: Path, model: str, method: str, config: Mapping[str, Any]) -> Series:
    methods = config.get("methods", {})
    # The answers do not depend on where the model is.
    shared = {name: value for name, value in config.items() if name not in ("tasks", "methods", "model_path", "endpoint")}
    settings = json.dumps([shared, methods[method]], sort_keys=True) if method in methods else ""
    return Series("", (folder,), model, method, versions=config.get("tasks", {}), settings=settings)
