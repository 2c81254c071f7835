"""The report's text: Markdown tables of scores, comparisons and costs, and the list of failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from memrl.evaluation.accuracy_plot import short_length
from memrl.evaluation.statistics import Difference
from memrl.evaluation.tasks import Length
from memrl.report.report_numbers import Cost, Score
from memrl.report.series import Series, cell_order

MOST_FAILURES = 20  # kinds of failure shown of a series; report.json has all of them


def score_table(lines: Mapping[str, Mapping[Length, Score]], unit: str) -> str:
    """Rows are series, columns lengths: percent [95% interval] and what it rests on."""
    lengths = in_order({length for line in lines.values() for length in line})
    rows = [[label, *(_score(line.get(length)) for length in lengths)] for label, line in lines.items()]
    return table([_corner(unit), *map(length_name, lengths)], rows)


def comparison_table(lines: Mapping[str, Mapping[Length, Difference | None]], unit: str) -> str:
    """Rows are series, columns lengths: difference to the baseline in points [95% interval] and the p-value."""
    lengths = in_order({length for line in lines.values() for length in line})
    rows = [[label, *(_difference(line.get(length)) for length in lengths)] for label, line in lines.items()]
    return table([_corner(unit), *map(length_name, lengths)], rows)


def cost_table(lines: Mapping[str, Mapping[Length, Cost]]) -> str:
    header = ["series", "length", "readings", "seconds", "prompt tokens", "response tokens", "peak memory (GiB)"]
    rows = []
    for label, line in lines.items():
        for length in in_order(line):
            cost = line[length]
            figures = (cost.seconds, "{:,.1f}"), (cost.prompt_tokens, "{:,.0f}"), (cost.response_tokens, "{:,.0f}")
            cells = ["-" if value is None else form.format(value) for value, form in figures]
            peak = "-" if cost.peak_gib is None else f"{cost.peak_gib:,.2f}"
            rows.append([label, length_name(length), f"{cost.readings:,}", *cells, peak])
    return table(header, rows)


def failures_of(series: Series) -> list[dict]:
    """Failures by task, length and reason with their number and the first sample's id, in the order of tasks and lengths."""
    counts: Counter[tuple] = Counter()
    first: dict[tuple, str] = {}
    for (task, length), rows in series.rows.items():
        for row in rows:
            if row["error"] is not None:
                counts[task, length, row["error"]] += 1
                first.setdefault((task, length, row["error"]), str(row["id"]))
    return [
        {"task": key[0], "length": key[1], "reason": key[2], "count": count, "first": first[key]} for key, count in counts.items()
    ]


def failure_table(failures: Sequence[dict]) -> str:
    shown = failures[:MOST_FAILURES]
    rows = [[one["task"], length_name(one["length"]), str(one["count"]), one["reason"], one["first"]] for one in shown]
    text = table(["task", "length", "readings", "reason", "the first of them"], rows, "---")
    more = len(failures) - len(shown)
    return f"{text}\n\n... and {more} more kinds; report.json has them all" if more else text


def table(header: Sequence[str], rows: Sequence[Sequence[str]], others: str = "---:") -> str:
    """A Markdown table; `others` aligns all columns but the first, which is text."""
    lines = [header, ["---"] + [others] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def in_order(lengths) -> list[Length]:
    return sorted(lengths, key=lambda length: cell_order(("", length)))


def length_name(length: Length) -> str:
    return short_length(length) if isinstance(length, int) else length


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _score(score: Score | None) -> str:
    if score is None:
        return ""
    n = f"n {score.n:,}" + (f" x {score.readings / score.n:g}" if score.readings != score.n else "")
    lost = [f"{count} {name}" for count, name in ((score.failures, "failed"), (score.empty, "empty")) if count]
    return f"**{percent(score.mean)}** [{percent(score.low)}, {percent(score.high)}] {', '.join([n, *lost])}"


def _difference(difference: Difference | None) -> str:
    if difference is None:
        return ""
    mean, low, high = (f"{100 * part + 0.0:+.1f}" for part in (difference.mean, difference.low, difference.high))
    p = "p < 0.001" if difference.p_value < 0.001 else f"p {difference.p_value:.3f}"
    return f"**{mean}** [{low}, {high}] {p}, n {difference.n:,}"


def _corner(unit: str) -> str:
    return f"series \\ length ({unit})" if unit else "series \\ length"


def _cell(text: str) -> str:
    # Line ends and bars would end the table's line or cell.
    return " ".join(str(text).split()).replace("|", "\\|")
