"""Read results folders for the report: one series per model and method, every reading once.

A folder may still be being written: rows are in one file or in one per process (`samples*.jsonl`), and last lines may be cut
off. Folders with the same model, method and settings but different tasks or lengths become one series.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memrl.evaluation.results import CONFIG_FILE
from memrl.evaluation.tasks import Length
from memrl.scoring.scores import SCORES
from memrl.utils.journal import read_records

# What a row must have. The types of those after "error" are not checked.
_TYPES = {
    **dict.fromkeys(("model", "method", "task", "held", "answer"), str),
    **dict.fromkeys((*SCORES, "chunks", "tokens", "index", "repeat"), (int, float)),
    **dict.fromkeys(("answers", "depths"), list),
    "length": (int, str),
    **dict.fromkeys(
        ("error", "id", "question", "prompt_tokens", "response_tokens", "seconds", "peak_gib", "chunk_tokens"), object
    ),
}
_GENERIC = ("model", "best")  # folder names that `memrl train` gives every model; the run's name is put before them

Row = dict[str, Any]
Cell = tuple[str, Length]


@dataclass
class Series:
    """The readings of one model with one method: a line of every table and of every picture.

    Attributes:
        label: unique among the series of a report.
        folders: where the rows come from.
        rows: the readings by (task, length), ordered by index and repeat; without prompts, responses and memories.
        versions: task versions by name, from the folder's settings.
        settings: what the answers depend on besides the tasks, as JSON; empty where the folder does not record it.
    """

    label: str
    folders: tuple[Path, ...]
    model: str
    method: str
    rows: dict[Cell, list[Row]] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    settings: str = ""

    @property
    def num_readings(self) -> int:
        return sum(map(len, self.rows.values()))


def cell_order(cell: Cell) -> tuple:
    """Sort key: tasks by name, lengths by size, then lengths that are names."""
    task, length = cell
    return task, isinstance(length, str), length


def sort_lengths(lengths: Iterable[Length]) -> list[Length]:
    return sorted(set(lengths), key=lambda length: cell_order(("", length)))


def sample_scores(rows: Sequence[Row], score: str) -> dict[int, float]:
    """The score of each sample by its index: the mean over its repeats."""
    values: dict[int, list[float]] = {}
    for row in rows:
        values.setdefault(row["index"], []).append(float(row[score]))
    return {index: math.fsum(repeats) / len(repeats) for index, repeats in values.items()}


def read_series(folders: Sequence[str | Path]) -> list[Series]:
    """All series of the folders, in their order, methods in the order of the folder's settings.

    Of two rows of one reading the later counts, but a failure never replaces an answer. Series of one model and method with
    the same settings and versions of tasks are joined, unless they have a task and length in common.

    Raises:
        ValueError: no such folder, a folder given twice, no rows, a damaged line, or rows of an earlier format; names the file.
    """
    found: list[Series] = []
    paths = [Path(folder) for folder in folders]
    for path in paths:
        if sum(other.resolve() == path.resolve() for other in paths) > 1:
            raise ValueError(f"{path} is given twice; give each results folder once")
        found += _read_folder(path)
    found = _join(found)
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
        cells = [cell for one in group for cell in one.rows]
        versions = {(task, json.dumps(version)) for one in group for task, version in one.versions.items()}
        if len(set(cells)) < len(cells) or len({task for task, _ in versions}) < len(versions):
            result += group
            continue
        rows = {cell: rows for one in group for cell, rows in one.rows.items()}
        joined = group[0]
        joined.rows = dict(sorted(rows.items(), key=lambda item: cell_order(item[0])))
        joined.folders = tuple(folder for one in group for folder in one.folders)
        joined.versions = {task: version for one in group for task, version in one.versions.items()}
        result.append(joined)
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
            row = _checked(record, f"{path}, line {number}")
            key = tuple(row[name] for name in ("model", "method", "task", "length", "index", "repeat"))
            if key not in readings or row["error"] is None or readings[key]["error"] is not None:
                readings[key] = row
    if not readings:
        raise ValueError(f"{folder} holds no rows yet; wait until `memrl eval` has finished a document")
    config = _read_config(folder)
    series: dict[tuple[str, str], Series] = {}
    for row in readings.values():
        if (identity := (row["model"], row["method"])) not in series:
            series[identity] = _new_series(folder, row, config)
    for row in sorted(readings.values(), key=_row_order):
        series[row["model"], row["method"]].rows.setdefault((row["task"], row["length"]), []).append(row)
    order = list(_section(config, "methods"))
    return sorted(series.values(), key=lambda one: order.index(one.method) if one.method in order else len(order))


def _row_order(row: Row) -> tuple:
    return *cell_order((row["task"], row["length"])), row["index"], row["repeat"]


def _new_series(folder: Path, row: Row, config: Mapping[str, Any]) -> Series:
    methods = _section(config, "methods")
    # The answers do not depend on where the model is.
    shared = {name: value for name, value in config.items() if name not in ("tasks", "methods", "model_path", "endpoint")}
    settings = json.dumps([shared, methods[row["method"]]], sort_keys=True) if row["method"] in methods else ""
    model = row["model"]
    path = Path(str(config.get("model_path") or model))
    if model in _GENERIC and path.name == model and path.parent.name:
        model = f"{path.parent.name}/{model}"
    return Series("", (folder,), model, row["method"], versions=_section(config, "tasks"), settings=settings)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        raise ValueError(f"{folder / CONFIG_FILE} is not JSON; run `memrl eval` into another folder") from None
    return config if isinstance(config, dict) else {}


def _checked(record: Row, where: str) -> Row:
    for name in _TYPES:
        if name not in record:
            raise ValueError(f"{where} has no {name!r}: rows of an earlier format; run `memrl eval` again into another --out")
    for name, kind in _TYPES.items():
        if not isinstance(record[name], kind):
            raise ValueError(f"{where}: {name} is {json.dumps(record[name])[:60]}; `memrl eval` does not write that")
    return {name: record[name] for name in _TYPES}
