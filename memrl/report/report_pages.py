"""A report as a folder: report.md, report.json and the pictures, all from the same numbers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from memrl.evaluation.statistics import Difference
from memrl.evaluation.tasks import Length
from memrl.report import report_numbers as numbers
from memrl.report import report_tables as tables
from memrl.report.depth_map import DepthMap, depth_map
from memrl.report.report_plots import Panel, plot_depths, plot_retention, plot_scores
from memrl.report.retention import Kept, Point, is_traced, kept, retention
from memrl.report.series import Series
from memrl.utils.files import write_whole

PICTURE = "accuracy_by_length.png"


@dataclass
class TaskNumbers:
    """All that the report says about one task; every mapping is by series and length.

    Attributes:
        baseline: what the other series are compared with: the report's baseline, if that has the task.
        ends: what the memory ever held and what it held at the end.
        answered: mean scores of the readings that `ends` is about.
        untraced: how many readings are left out of `curves` and `ends`, see `is_traced`.
    """

    name: str
    unit: str
    baseline: Series
    scores: dict[str, dict[Length, numbers.Score]] = field(default_factory=dict)
    differences: dict[str, dict[Length, Difference | None]] = field(default_factory=dict)
    costs: dict[str, dict[Length, numbers.Cost]] = field(default_factory=dict)
    curves: dict[str, dict[Length, list[Point]]] = field(default_factory=dict)
    ends: dict[str, dict[Length, Kept]] = field(default_factory=dict)
    answered: dict[str, dict[Length, float]] = field(default_factory=dict)
    untraced: dict[str, int] = field(default_factory=dict)
    depths: dict[str, DepthMap] = field(default_factory=dict)


@dataclass
class Report:
    """The numbers of a report.

    Attributes:
        averaged: the tasks of the average; empty where there is none.
    """

    series: list[Series]
    baseline: Series
    score: str
    tasks: list[TaskNumbers]
    averaged: list[str]
    average: dict[str, dict[Length, numbers.Score]]
    units: Mapping[str, str]


def make_report(
    series: Sequence[Series], score: str, baseline: str | None, ruler: Sequence[str], units: Mapping[str, str]
) -> Report:
    """All numbers of a report.

    Args:
        baseline: label of the series that the others are compared with; None is the first. On a task that it has not, the
            first series that has it takes its place.
        ruler: names of the tasks that are averaged, as far as they are there.
        units: what a task's lengths count, by name.

    Raises:
        ValueError: no series has that label.
    """
    labels = [one.label for one in series]
    if baseline is not None and baseline not in labels:
        known = ", ".join(repr(label) for label in labels)
        raise ValueError(f"baseline is {baseline!r}, and the series are {known}; give one of them")
    base = series[labels.index(baseline) if baseline is not None else 0]
    names = sorted({task for one in series for task, _ in one.rows})
    averaged = [task for task in ruler if task in names]
    average = {one.label: numbers.average_of(one, averaged, score) for one in series} if len(averaged) > 1 else {}
    average = {label: line for label, line in average.items() if line}
    found = [_task_numbers(task, series, base, score, units.get(task, "")) for task in names]
    return Report(list(series), base, score, found, averaged if average else [], average, units)


def _task_numbers(task: str, series: Sequence[Series], base: Series, score: str, unit: str) -> TaskNumbers:
    base = numbers.baseline_of(task, series, base)
    result = TaskNumbers(task, unit, base)
    for one in series:
        rows = {length: several for (name, length), several in one.rows.items() if name == task}
        if not rows:
            continue
        result.scores[one.label] = {length: numbers.score_of(several, score) for length, several in rows.items()}
        result.costs[one.label] = {length: numbers.cost_of(several) for length, several in rows.items()}
        if one is not base:
            result.differences[one.label] = {length: numbers.compare(one, base, (task, length), score) for length in rows}
        traced = {length: [row for row in several if is_traced(row)] for length, several in rows.items()}
        ends = {length: end for length, several in traced.items() if (end := kept(several)) is not None}
        if ends:
            result.ends[one.label] = ends
            result.answered[one.label] = {length: numbers.score_of(traced[length], score).mean for length in ends}
            result.untraced[one.label] = sum(len(rows[length]) - len(traced[length]) for length in rows)
            curves = {length: retention(traced[length]) for length in ends}
            result.curves[one.label] = {length: points for length, points in curves.items() if points}
        if (depths := depth_map(rows, score)) is not None:
            result.depths[one.label] = depths
    return result


def write_report(report: Report, out: Path) -> list[str]:
    """Write the folder; returns the names of its files. The same rows give the same bytes.

    Raises:
        ValueError: `out` is no folder.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is not a folder; give another")
    out.mkdir(parents=True, exist_ok=True)
    pictures = _draw(report, out)
    write_whole(out / "report.json", json.dumps(_as_json(report), indent=1, allow_nan=False) + "\n")
    write_whole(out / "report.md", _text(report, pictures))
    return ["report.md", "report.json", *(name for name, _ in pictures)]


def _draw(report: Report, out: Path) -> list[tuple[str, str]]:
    """Draw all pictures; their file names and what they show."""
    labels = [one.label for one in report.series]
    panels = [Panel(task.name, task.unit, task.scores) for task in report.tasks]
    if report.average:
        title = f"average of {len(report.averaged)} RULER tasks"
        panels.insert(0, Panel(title, report.units.get(report.averaged[0], ""), report.average))
    plot_scores(out / PICTURE, panels, labels, report.score)
    pictures = [(PICTURE, "Accuracy by document length")]
    for task in report.tasks:
        safe = re.sub(r"[^A-Za-z0-9_.-]", "_", task.name)
        if task.ends:
            ends = {
                label: {length: (end, task.answered[label][length]) for length, end in line.items()}
                for label, line in task.ends.items()
            }
            name = f"retention_{safe}.png"
            note = left_out(task)
            plot_retention(out / name, task.curves, ends, task.name, task.unit, report.score, note)
            pictures.append((name, f"{task.name}: is the gold answer in the memory?"))
        if task.depths:
            plot_depths(out / f"depth_{safe}.png", task.depths, task.name, task.unit, report.score)
            pictures.append((f"depth_{safe}.png", f"{task.name}: score by depth of the evidence and length"))
    return pictures


def left_out(task: TaskNumbers) -> str:
    """What the picture of retention does not show, in words; empty where it shows all readings."""
    count = sum(task.untraced.values())
    if not count:
        return ""
    readings = sum(score.readings for label in task.ends for score in task.scores[label].values())
    return f"left out: {count:,} of {readings:,} readings,\nwhose gold answers (yes, no) have no words to look for"


def _text(report: Report, pictures: Sequence[tuple[str, str]]) -> str:
    first = [[one.label, one.method, _folders(one), f"{sum(map(len, one.rows.values())):,}"] for one in report.series]
    parts = [
        "# Evaluation",
        f"Score: {report.score}, in %. [a, b] is a 95% interval over samples: Wilson's where each sample's score is 0 or 1, "
        'else the bootstrap\'s. n counts samples; "n 128 x 4" are 4 readings of each. Failed and empty answers count as wrong.',
        tables.table(["series", "method", "folder", "readings"], first, "---"),
        *(f"![{_alt(text)}]({quote(name)})" for name, text in pictures[:1]),
        "## Scores",
    ]
    if report.average:
        unit = report.units.get(report.averaged[0], "")
        parts += [f"### Average of {len(report.averaged)} RULER tasks", tables.score_table(report.average, unit)]
        parts += [f"Averaged: {', '.join(report.averaged)}; a length stands here where a series has all of them."]
        if report.score != "ruler":
            parts[-1] += f" RULER's published averages are to be compared with `--score ruler`, not with {report.score}."
    for task in report.tasks:
        parts += [f"### {task.name}", tables.score_table(task.scores, task.unit)]
    if len(report.series) > 1:
        parts += _comparisons(report)
    parts += [f"![{_alt(text)}]({quote(name)})" for name, text in pictures[1:]]
    parts += [
        "## Cost",
        "Means per reading; seconds are those of the clock while other readings ran beside it; the highest peak.",
    ]
    for task in report.tasks:
        parts += [f"### Cost of {task.name}", tables.cost_table(task.costs)]
    parts += ["## Failures"]
    for one in report.series:
        if failures := tables.failures_of(one):
            parts += [f"### Failures of {one.label}", tables.failure_table(failures)]
    if parts[-1] == "## Failures":
        parts.append("None.")
    return "\n\n".join(parts) + "\n"


def _comparisons(report: Report) -> list[str]:
    parts = [
        "## Compared in pairs",
        f"Points above or below {report.baseline.label} on the samples that both have, [95% interval] and the two-sided p-value "
        "of the sign-flip test. Interval and p-value are two methods, which can disagree at the edge where samples are few. "
        "The p-values are not corrected for their number: of twenty comparisons without a difference one is expected below 0.05.",
    ]
    for task in report.tasks:
        lines = {label: line for label, line in task.differences.items() if any(line.values())}
        if lines:
            parts.append(f"### {task.name} against {task.baseline.label}")
            if task.baseline is not report.baseline:
                parts.append(f"{report.baseline.label} has no readings of {task.name}; {task.baseline.label} takes its place.")
            for one in report.series:
                if one.label in lines and numbers.has_other_version(one, task.baseline, task.name):
                    what = f"its {task.name} has another version; equal questions may come with other documents."
                    parts.append(f"**{one.label}**: {what}")
            parts.append(tables.comparison_table(lines, task.unit))
    return parts


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "score": report.score,
        "baseline": report.baseline.label,
        "series": [
            {
                "label": one.label,
                "model": one.model,
                "method": one.method,
                "folders": [folder.as_posix() for folder in one.folders],
                "readings": sum(map(len, one.rows.values())),
                "failures": tables.failures_of(one),
            }
            for one in report.series
        ],
        "average": {"tasks": report.averaged, "scores": _plain(report.average)},
        "tasks": [
            {
                "task": task.name,
                "unit": task.unit,
                "baseline": task.baseline.label,
                "scores": _plain(task.scores),
                "differences": _plain(task.differences),
                "costs": _plain(task.costs),
                "retention": _plain(task.curves),
                "memory": _plain(task.ends),
                "untraced": task.untraced,
                "depths": _plain(task.depths),
            }
            for task in report.tasks
        ],
    }


def _plain(value: Any) -> Any:
    """Dataclasses, arrays and mappings as JSON has them; NaN, a cell without readings, is null."""
    if hasattr(value, "__dataclass_fields__"):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _folders(one: Series) -> str:
    return ", ".join(folder.as_posix() for folder in one.folders)


def _alt(text: str) -> str:
    return text.replace("[", "(").replace("]", ")")
