"""Write a report as a folder: report.md, report.json and the pictures, all from the same numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from memrl.evaluation.accuracy_plot import Panel, plot_panels
from memrl.evaluation.statistics import Difference
from memrl.report.rendering import render
from memrl.report.report_numbers import Report, Score, has_other_version, make_report
from memrl.report.report_plots import plot_depths, plot_retention
from memrl.report.series import Series, sort_lengths
from memrl.utils.files import check_own_output, write_whole
from memrl.utils.pictures import MARK, length_name

__all__ = ["make_report", "write_report"]

_TASK_KEYS = ("scores", "differences", "costs", "retention", "memory", "untraced", "depths")
MAX_FAILURES = 20  # kinds of failure shown of a series; report.json has all of them


def write_report(report: Report, out: Path) -> list[str]:
    """Write the folder; returns the names of its files. The same rows give the same bytes."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is not a folder; give another")
    out.mkdir(parents=True, exist_ok=True)
    for name, mark in (("report.md", b"# Evaluation\n\nScore: "), ("report.json", b'{\n "score": "')):
        check_own_output(out / name, mark)
    for path in out.glob("*.png"):  # any of them may be about to be drawn again
        if re.match(r"accuracy_by_length|retention_|depth_", path.name):
            check_own_output(path, MARK)
    pictures = _draw(report, out)
    write_whole(out / "report.json", as_json(report))
    write_whole(out / "report.md", markdown(report, pictures))
    return ["report.md", "report.json", *(name for name, _ in pictures)]


def _draw(report: Report, out: Path) -> list[tuple[str, str]]:
    """Draw all pictures; returns their file names and what they show."""
    panels = [Panel(task.name, task.unit, task.scores) for task in report.tasks]
    if report.average:
        panels.insert(0, Panel(f"average of {len(report.averaged)} RULER tasks", report.average_unit, report.average))
    pictures = [("accuracy_by_length.png", "Accuracy by document length")]
    plot_panels(out / pictures[0][0], panels, [one.label for one in report.series], report.score)
    taken: set[str] = set()
    for number, task in enumerate(report.tasks):
        safe_name = re.sub(r"[^A-Za-z0-9_.-]", "_", task.name)[:80]
        safe_name += f"_{number}" * (safe_name in taken)  # two tasks must not share a picture
        taken.add(safe_name)
        if task.memory:
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


def _score_cell(score: Score) -> Markup:
    """Percent [95% interval] and the number of samples."""
    n = f"n {score.n:,}" + (f" x {score.readings / score.n:g}" if score.readings != score.n else "")
    wrong = [f"{count} {name}" for count, name in ((score.failures, "failed"), (score.empty, "empty")) if count]
    return _with_interval(score, "{:.1f}", ", ".join([n, *wrong]))


def _difference_cell(difference: Difference) -> Markup:
    """Points [95% interval], the p-value and the number of samples."""
    p = "p < 0.001" if difference.p_value < 0.001 else f"p {difference.p_value:.3f}"
    return _with_interval(difference, "{:+.1f}", f"{p}, n {difference.n:,}")


def _with_interval(value: Score | Difference, form: str, rest: str) -> Markup:
    mean, low, high = (form.format(100 * share + 0.0) for share in (value.mean, value.low, value.high))
    return Markup(f"**{mean}** [{low}, {high}] {rest}")


def as_json(report: Report) -> str:
    """The text of report.json."""
    content = {
        "score": report.score,
        "baseline": report.baseline.label,
        "series": [
            {name: getattr(one, name) for name in ("label", "model", "method")}
            | {"folders": [folder.as_posix() for folder in one.folders]}
            | {"readings": sum(map(len, one.rows.values())), "failures": failures_of(one)}
            for one in report.series
        ],
        "average": {"tasks": report.averaged, "scores": report.average},
        "tasks": [
            {"task": task.name, "unit": task.unit, "baseline": task.baseline.label}
            | {name: getattr(task, name) for name in _TASK_KEYS}
            for task in report.tasks
        ],
    }
    return json.dumps(content, indent=1, allow_nan=False, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """A dataclass, or an array, whose NaN (cells without readings) become null."""
    return np.where(np.isnan(value), np.array(None), value).tolist() if isinstance(value, np.ndarray) else vars(value)
