"""From rows to a table: one line per task and length, with intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from memrl.files import write_whole

if TYPE_CHECKING:
    from memrl.evaluation.runner import Row

Z_95 = 1.959963984540054  # the 97.5% quantile of the normal distribution


def wilson_interval(successes: float, trials: int, z: float = Z_95) -> tuple[float, float]:
    """Confidence interval of a proportion (Wilson, JASA 22, 1927), 95% by default.

    With p = successes / trials and n = trials:

        (p + z^2 / 2n  -+  z * sqrt(p * (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Unlike p -+ z * sqrt(p * (1 - p) / n) it stays within [0, 1], is not empty at 0 or n successes, and
    covers what it promises for small n (Brown, Cai and DasGupta, Statistical Science 16, 2001).

    >>> [round(bound, 4) for bound in wilson_interval(81, 263)]
    [0.2553, 0.3662]
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials have no interval")
    p, n = successes / trials, trials
    centre = p + z * z / (2 * n)
    margin = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At the ends the exact bound is 0 or 1, which rounding misses by 1e-17.
    low = 0.0 if successes == 0 else (centre - margin) / scale
    high = 1.0 if successes == trials else (centre + margin) / scale
    return low, high


def summarize(rows: Iterable[Row], method: str = "memory") -> list[dict[str, Any]]:
    """One entry per task and length: n, failures (counted as wrong), means of the scores, 95% intervals."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["length"]), []).append(row)
    summary = []
    for (task, length), group in sorted(groups.items(), key=lambda item: (item[0][0], str(type(item[0][1])), item[0][1])):
        n = len(group)
        entry = {"task": task, "length": length, "method": method, "n": n}
        entry["failures"] = sum(row["error"] is not None for row in group)
        for score in ("strict", "lenient", "f1"):
            entry[score] = math.fsum(row[score] for row in group) / n
        for score in ("strict", "lenient"):  # f1 is not a proportion
            entry[f"{score}_interval"] = list(wilson_interval(sum(row[score] for row in group), n))
        for size in ("chunks", "tokens"):
            entry[f"mean_{size}"] = sum(row[size] for row in group) / n
        summary.append(entry)
    return summary


def write_summary(summary: list[dict[str, Any]], path: str | Path) -> None:
    """Write the summary as JSON, whole or not at all."""
    write_whole(path, json.dumps(summary, indent=2) + "\n")


def print_table(summary: list[dict[str, Any]], units: dict[str, str] | None = None, file: TextIO | None = None) -> None:
    """Print the summary for people: scores in percent with their 95% intervals.

    Args:
        units: what each task's lengths count, by task name.
        file: standard output by default.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(file=file)
    if not console.is_terminal:
        console = Console(file=file, width=120)  # a log file has no width of its own
    table = Table(box=box.SIMPLE_HEAD)
    named = sorted({unit for unit in (units or {}).values() if unit})
    title_of_lengths = f"length ({named[0]})" if len(named) == 1 else "length"
    for title in ("task", title_of_lengths, "n", "failed", "strict %", "95%", "lenient %", "95%", "f1 %", "tokens"):
        table.add_column(title, justify="left" if title == "task" else "right", style="dim" if title == "95%" else "")
    for entry in summary:
        unit = (units or {}).get(entry["task"], "") if len(named) > 1 else ""
        table.add_row(
            entry["task"],
            f"{entry['length']} {unit}".rstrip(),
            str(entry["n"]),
            f"[red]{entry['failures']}[/]" if entry["failures"] else "0",
            *(text for score in ("strict", "lenient") for text in (_percent(entry[score]), _range(entry, score))),
            _percent(entry["f1"]),
            f"{entry['mean_tokens']:,.0f}",
        )
    console.print(table)


def _percent(score: float) -> str:
    return f"{100 * score:.1f}"


def _range(entry: dict[str, Any], score: str) -> str:
    low, high = entry[f"{score}_interval"]
    return f"{100 * low:.1f}-{100 * high:.1f}"
