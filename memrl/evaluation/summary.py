"""Summarize rows by task, length and method: mean scores with intervals, and the printed table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

from memrl.evaluation.statistics import score_interval
from memrl.scoring.scores import SCORES
from memrl.utils.plain_text import printable

if TYPE_CHECKING:
    from memrl.evaluation.runner import Row

TASK_WIDTH = 16  # characters of a task's name before it is wrapped on a narrow terminal


def summarize(rows: Iterable[Row], *, costs: bool = False) -> list[dict[str, Any]]:
    """One entry per task, length and method: counts, mean scores and their 95% intervals.

    The unit is the sample: with several readings of each, n is still the number of samples, a score is the mean over samples of
    the mean over readings, and the intervals are over samples. Failures and empty answers are counted over readings; both are
    wrong answers.

    Args:
        costs: add the mean seconds of a reading and the peak memory, which differ from run to run.
    """
    cells: dict[tuple, list[Row]] = {}
    for row in rows:
        cells.setdefault((row["task"], row["length"], row["method"]), []).append(row)
    ordered = sorted(cells.items(), key=lambda item: (item[0][0], isinstance(item[0][1], str), *item[0][1:]))
    return [_entry(cell, group, costs) for cell, group in ordered]


def _entry(cell: tuple, rows: list[Row], costs: bool) -> dict[str, Any]:
    samples: dict[int, list[Row]] = {}
    for row in rows:
        samples.setdefault(row["index"], []).append(row)
    task, length, method = cell
    entry = {"task": task, "length": length, "method": method, "n": len(samples)}
    entry["repeats"] = max(map(len, samples.values()))
    entry["failures"] = sum(row["error"] is not None for row in rows)
    entry["empty"] = sum(row["error"] is None and not row["answer"] for row in rows)
    for score in SCORES:
        means = [_mean([row[score] for row in samples[index]]) for index in sorted(samples)]
        entry[score] = _mean(means)
        entry[f"{score}_interval"] = list(score_interval(means))
    for size in ("chunks", "tokens", "prompt_tokens", "response_tokens"):
        entry[f"mean_{size}"] = _mean([row[size] for row in rows])
    if costs:
        entry["mean_seconds"] = _mean([row["seconds"] for row in rows])
        entry["peak_gib"] = max((row["peak_gib"] for row in rows if row["peak_gib"] is not None), default=None)
    return entry


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def print_table(summary: list[dict[str, Any]], units: dict[str, str], file: TextIO | None = None) -> None:
    """Print the summary as a table: scores in percent, those of the two verifiers with 95% intervals; units by task name."""
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    console = Console(file=file)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    named = sorted({unit for unit in units.values() if unit})
    titles = ["task", "method", f"length ({named[0]})" if len(named) == 1 else "length", "n", "failed", "empty"]
    titles += ["strict %", "95%", "lenient", "95%", "exact", "f1", "ruler", "tokens"]
    titles += ["s"] * any("mean_seconds" in entry for entry in summary)
    for title in titles:
        justify = "left" if title in ("task", "method") else "right"
        # rich cuts cells that it may not wrap, so only the task's name may wrap.
        table.add_column(title, justify=justify, style="dim" if title == "95%" else "", no_wrap=title != "task", overflow="fold")
    for entry in summary:
        table.add_row(*_table_row(entry, units[entry["task"]] if len(named) > 1 else ""))
    whole = Measurement.get(console, console.options.update(max_width=10**4), table).maximum
    longest = max((len(entry["task"]) for entry in summary), default=0)
    least = whole - max(0, longest - TASK_WIDTH)
    # A log file has no width, and a terminal wraps lines that are too long, which is better than cut numbers.
    console.width = max(console.width, least) if console.is_terminal else whole
    console.print(table)


def _table_row(entry: dict[str, Any], unit: str) -> list[str]:
    from rich.markup import escape

    cells = [escape(printable(entry["task"])), entry["method"], f"{entry['length']} {unit}".rstrip()]
    cells.append(str(entry["n"]) if entry["repeats"] == 1 else f"{entry['n']} x {entry['repeats']}")
    cells += [f"[red]{entry[name]}[/]" if entry[name] else "0" for name in ("failures", "empty")]
    for score in ("strict", "lenient"):
        low, high = entry[f"{score}_interval"]
        cells += [f"{100 * entry[score]:.1f}", f"{100 * low:.0f}-{100 * high:.0f}"]
    cells += [f"{100 * entry[score]:.1f}" for score in ("exact", "f1", "ruler")]
    cells.append(f"{entry['mean_tokens']:,.0f}")
    if "mean_seconds" in entry:
        cells.append(f"{entry['mean_seconds']:.3g}")
    return cells
