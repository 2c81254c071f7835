"""Write a report as a folder: report.md, report.json and the pictures, all from the same numbers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from memrl.evaluation.accuracy_plot import Panel, plot_panels
from memrl.evaluation.statistics import Difference
from memrl.report.rendering import render
from memrl.report.report_numbers import Report, Score, has_other_version, make_report
from memrl.report.report_plots import plot_depths, plot_retention
from memrl.report.retention import RetentionPoint
from memrl.report.series import Series, sort_lengths
from memrl.utils.files import write_whole
from memrl.utils.pictures import length_name

__all__ = ["make_report", "write_report"]

_TASK_KEYS = {name: name for name in ("scores", "differences", "costs")} | {"retention": "curves", "memory": "at_end"}
_TASK_KEYS |= {name: name for name in ("untraced", "depths")}  # keys of a task in report.json, and the fields they hold
MAX_FAILURES = 20  # kinds of failure shown of a series; report.json has all of them


def write_report(report: Report, out: Path) -> list[str]:
    """Write the folder; returns the names of its files. The same rows give the same bytes.

    Raises:
        ValueError: `out` is not a folder.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is not a folder; give another")
    out.mkdir(parents=True, exist_ok=True)
    pictures = _draw(report, out)
    write_whole(out / "report.json", json.dumps(as_json(report), indent=1, allow_nan=False) + "\n")
    write_whole(out / "report.md", markdown(report, pictures))
    return ["report.md", "report.json", *(name for name, _ in pictures)]


def _draw(report: Report, out: Path) -> list[tuple[str, str]]:
    """Draw all pictures; returns their file names and what they show."""
    panels = [Panel(task.name, task.unit, task.scores) for task in report.tasks]
    if report.average:
        panels.insert(0, Panel(f"average of {len(report.averaged)} RULER tasks", report.average_unit, report.average))
    pictures = [("accuracy_by_length.png", "Accuracy by document length")]
    plot_panels(out / pictures[0][0], panels, [one.label for one in report.series], report.score)
    for task in report.tasks:
        safe_name = re.sub(r"[^A-Za-z0-9_.-]", "_", task.name)
        if task.at_end:
            pictures.append((f"retention_{safe_name}.png", f"{task.name}: is the gold answer in the memory?"))
            plot_retention(out / pictures[-1][0], task, report.score)
        if task.depths:
            pictures.append((f"depth_{safe_name}.png", f"{task.name}: score by depth of the evidence and length"))
            plot_depths(out / pictures[-1][0], task, report.score)
    return pictures


def markdown(report: Report, pictures: Sequence[tuple[str, str]]) -> str:
    """The text of report.md; `pictures` are file names and what they show."""
    return render(
        "report.md.j2",
        report=report,
        pictures=pictures,
        failures={one.label: kinds for one in report.series if (kinds := failures_of(one))},
        max_failures=MAX_FAILURES,
        sort_lengths=sort_lengths,
        length_name=length_name,
        score_cell=_score_cell,
        difference_cell=_difference_cell,
        has_other_version=has_other_version,
    )


def failures_of(series: Series) -> list[dict[str, Any]]:
    """Failures by task, length and reason, with their number and the first sample's id, in the order of tasks and lengths."""
    samples: dict[tuple, list[str]] = {}
    for cell, rows in series.rows.items():
        for row in rows:
            if row["error"] is not None:
                samples.setdefault((*cell, row["error"]), []).append(str(row["id"]))
    return [
        {"task": task, "length": length, "reason": reason, "count": len(ids), "first": ids[0]}
        for (task, length, reason), ids in samples.items()
    ]


def _score_cell(score: Score | None) -> Markup | str:
    """Percent [95% interval] and the number of samples."""
    if score is None:
        return ""
    mean, low, high = (f"{100 * share:.1f}" for share in (score.mean, score.low, score.high))
    n = f"n {score.n:,}" + (f" x {score.readings / score.n:g}" if score.readings != score.n else "")
    wrong = [f"{count} {name}" for count, name in ((score.failures, "failed"), (score.empty, "empty")) if count]
    return Markup(f"**{mean}** [{low}, {high}] {', '.join([n, *wrong])}")


def _difference_cell(difference: Difference | None) -> Markup | str:
    """Points [95% interval], the p-value and the number of samples."""
    if difference is None:
        return ""
    mean, low, high = (f"{100 * share + 0.0:+.1f}" for share in (difference.mean, difference.low, difference.high))
    p = "p < 0.001" if difference.p_value < 0.001 else f"p {difference.p_value:.3f}"
    return Markup(f"**{mean}** [{low}, {high}] {p}, n {difference.n:,}")


def as_json(report: Report) -> dict[str, Any]:
    """The content of report.json."""
    return {
        "score": report.score,
        "baseline": report.baseline.label,
        "series": [
            {name: getattr(one, name) for name in ("label", "model", "method")}
            | {"folders": [folder.as_posix() for folder in one.folders]}
            | {"readings": one.num_readings, "failures": failures_of(one)}
            for one in report.series
        ],
        "average": {"tasks": report.averaged, "scores": _plain(report.average)},
        "tasks": [
            {"task": task.name, "unit": task.unit, "baseline": task.baseline.label}
            | {key: _plain(getattr(task, name)) for key, name in _TASK_KEYS.items()}
            for task in report.tasks
        ],
    }


def _plain(value: Any) -> Any:
    """Dataclasses, arrays and mappings as JSON values; NaN, a cell without readings, becomes null."""
    if isinstance(value, RetentionPoint):
        return {"after": value.after, "held": value.retained, "n": value.n}
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value
