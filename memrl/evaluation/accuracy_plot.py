"""Draw accuracy by document length: one panel per task, one line with 95% intervals per series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memrl.evaluation.tasks import Length
from memrl.utils import pictures

_MAX_BANDS = 3  # more bands on top of each other cannot be distinguished; bars are drawn instead


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% interval, as shares of 1."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Panel:
    """Accuracy on one task."""

    title: str
    unit: str  # what the lengths count
    lines: Mapping[str, Mapping[Length, Estimate]]  # by series label and length
    trained_to: int | None = None  # the longest document of training, marked where given


def plot_accuracy(
    path: str | Path,
    series: Mapping[str, Sequence[Mapping[str, Any]]],
    unit: str = "chunks",
    title: str = "Accuracy by document length",
    trained_to: int | None = None,
) -> None:
    """Write a PNG with one panel of the strict scores; for `unit`, `title` and `trained_to` see `Panel`.

    Args:
        series: entries of `summarize` by label, the baseline first: {"before RL": ..., "after RL": ...}.

    Raises:
        ValueError: no entry has a number as its length.
    """
    lines: dict[str, dict[Length, Estimate]] = {
        label: {e["length"]: Estimate(e["strict"], *e["strict_interval"]) for e in entries if isinstance(e["length"], int)}
        for label, entries in series.items()
    }
    lines = {label: line for label, line in lines.items() if line}
    if not lines:
        raise ValueError("there is nothing to plot: no length is a number")
    plot_panels(path, [Panel(title, unit, lines, trained_to)], list(lines), "strict")


def plot_panels(path: str | Path, panels: Sequence[Panel], labels: Sequence[str], score: str) -> None:
    """Write a PNG of several panels; `labels` are all series in the order of their colours."""
    count = len(panels)
    columns = count if count <= 3 else 2 if count == 4 else 3 if count <= 9 else 4
    width, height = (8.2, 4.4) if count == 1 else (4.6, 3.1) if columns < 4 else (3.9, 2.7)
    size = (width * columns, height * -(-count // columns) + 0.3 + 0.22 * -(-len(labels) // 3))
    figure, grid = pictures.make_panels(count, columns, size)
    for number, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        _draw(axes, panel, labels, max_labels=14 if count == 1 else 7)
        if number % columns == 0:
            pictures.axis_labels(axes, y=f"answered right ({score})")
    # A letter of the legend takes about a twelfth of an inch, its line and gaps two thirds.
    fitting = int(size[0] / (max(map(len, labels)) / 12 + 0.66))
    figure.legend(
        [pictures.legend_line(**pictures.series_style(number)) for number in range(len(labels))],
        [pictures.literal(label) for label in labels],
        loc="outside upper left",
        ncols=max(1, min(len(labels), 4, fitting)),
        frameon=False,
    )
    pictures.note(figure, f"{'bands' if len(labels) <= _MAX_BANDS else 'bars'}: 95% intervals")
    pictures.save(figure, path)


def _draw(axes: pictures.Axes, panel: Panel, labels: Sequence[str], max_labels: int) -> None:
    numeric = sorted({length for line in panel.lines.values() for length in line if isinstance(length, int)})
    use_bands = len(labels) <= _MAX_BANDS
    for number, label in enumerate(labels):
        line, style = panel.lines.get(label, {}), pictures.series_style(number)
        # Bars of several series at one length must not hide each other.
        shift = 1.0 if use_bands else 2 ** (0.05 * (number - (len(labels) - 1) / 2))
        points = [(shift * length, line[length]) for length in numeric if length in line]
        if not numeric:
            points = [(number, estimate) for estimate in line.values()]
        if not points:
            continue
        x = [place for place, _ in points]
        mean, low, high = ([100 * getattr(estimate, name) for _, estimate in points] for name in ("mean", "low", "high"))
        if numeric and use_bands and len(x) > 1:
            pictures.draw_band(axes, x, low, high, style["color"])
        else:
            axes.vlines(x, low, high, color=style["color"], alpha=0.55, linewidth=1.3)
        axes.plot(x, mean, clip_on=False, zorder=3, **style)
    pictures.percent_axis(axes)
    pictures.panel_title(axes, panel.title)
    if numeric:
        pictures.length_axis(axes, numeric, panel.unit, max_labels)
    else:
        axes.set(xlim=(-0.7, len(labels) - 0.3), xticks=[])
    if panel.trained_to is not None:
        axes.axvline(panel.trained_to, color=pictures.SOFT, linestyle=(0, (3, 3)), linewidth=1, zorder=1)
        text, place = f"trained up to {pictures.length_name(panel.trained_to)} {panel.unit}", (panel.trained_to, 50)
        axes.annotate(text, place, xytext=(5, 0), textcoords="offset points", color=pictures.SOFT, fontsize=8.5)
