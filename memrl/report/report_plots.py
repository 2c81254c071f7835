"""The report's three pictures: accuracy by length, retention of evidence, and scores by depth and length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memrl.evaluation.accuracy_plot import COLOURS, MARKERS, SOFT, length_axis, percent_axis, short_length, unframed
from memrl.evaluation.tasks import Length
from memrl.report.depth_map import BINS, FEW, DepthMap
from memrl.report.report_numbers import Score
from memrl.report.retention import Kept, Point

DPI = 130
_HELD, _LOST, _NEVER = "#0072B2", "#E69F00", "#DDDDDD"
_MOST_BANDS = 3  # more bands over each other make a mud in which none can be seen


@dataclass(frozen=True)
class Panel:
    """One small picture of accuracy: scores by length for every series that has any, by label."""

    title: str
    unit: str
    lines: Mapping[str, Mapping[Length, Score]]


def plot_scores(path: Path, panels: Sequence[Panel], labels: Sequence[str], score: str) -> None:
    """Write a PNG with one panel per task; `labels` are all series in the order of their colours."""
    columns = len(panels) if len(panels) <= 3 else 2 if len(panels) == 4 else 3 if len(panels) <= 9 else 4
    rows = -(-len(panels) // columns)
    width, height = ((8.2, 4.4) if len(panels) == 1 else (4.6, 3.1)) if columns < 4 else (3.9, 2.7)
    plt, figure, grid = _figure(rows, columns, (width * columns, height * rows + _legend_height(labels)))
    for number, axes in enumerate(grid.flat):
        if number >= len(panels):
            axes.set_axis_off()
            continue
        _draw_scores(axes, panels[number], labels, most=14 if len(panels) == 1 else 7)
        if number % columns == 0:
            axes.set_ylabel(f"answered right ({score})", fontsize=9)
    handles = [
        plt.Line2D([], [], color=_colour(k), marker=_marker(k), linestyle=_style(k), linewidth=2, markersize=6)
        for k in range(len(labels))
    ]
    figure.legend(handles, labels, loc="outside upper left", ncols=_legend_columns(labels, width * columns), frameon=False)
    kind = "bands" if len(labels) <= _MOST_BANDS else "bars"
    figure.supxlabel(f"{kind}: 95% intervals", fontsize=8, color=SOFT, x=0.995, ha="right")
    _write(plt, figure, path)


def _draw_scores(axes, panel: Panel, labels: Sequence[str], most: int) -> None:
    numeric = sorted({length for line in panel.lines.values() for length in line if isinstance(length, int)})
    for number, label in enumerate(labels):
        line = panel.lines.get(label, {})
        style = {"color": _colour(number), "marker": _marker(number), "markersize": 5.5, "clip_on": False}
        if numeric:
            scores = [(length, line[length]) for length in numeric if length in line]
            # A little beside their length, so that the bars of several series do not hide each other.
            shift = 2 ** (0.05 * (number - (len(labels) - 1) / 2)) if len(labels) > _MOST_BANDS else 1.0
        else:
            scores, shift = [(number, score) for score in line.values()], 1.0
        if not scores:
            continue
        x = np.array([place for place, _ in scores], dtype=float)
        mean, low, high = (100 * np.array([getattr(score, name) for _, score in scores]) for name in ("mean", "low", "high"))
        if numeric and len(labels) <= _MOST_BANDS and len(x) > 1:
            axes.fill_between(x, low, high, color=_colour(number), alpha=0.15, linewidth=0)
        else:
            axes.vlines(x * shift, low, high, color=_colour(number), alpha=0.55, linewidth=1.3)
        axes.plot(x * shift, mean, linestyle=_style(number), linewidth=1.9, zorder=3, **style)
    percent_axis(axes)
    axes.tick_params(labelsize=8.5)
    axes.tick_params(axis="x", pad=7)  # markers at 0% reach below the axis
    axes.set_title(panel.title, loc="left", fontsize=10.5, fontweight="bold")
    if numeric:
        length_axis(axes, numeric, most)
        axes.set_xlabel(_length_label(panel.unit), fontsize=8.5, color=SOFT)
    else:
        axes.set_xlim(-0.7, len(labels) - 0.3)
        axes.set_xticks([])


def plot_retention(
    path: Path,
    curves: Mapping[str, Mapping[Length, Sequence[Point]]],
    ends: Mapping[str, Mapping[Length, tuple[Kept, float]]],
    title: str,
    unit: str,
    score: str,
    note: str = "",
) -> None:
    """Write a PNG with two panels per series: what happens to evidence after it was read, and what is left at the end.

    Args:
        curves: by series and length, what is held so many chunks after the evidence.
        ends: by series and length, what was ever held and what is held at the end, and the mean score.
        note: what the picture does not show; stands over the legend.
    """
    lengths = sorted({length for line in ends.values() for length in line}, key=lambda length: (isinstance(length, str), length))
    pairs = 1 if len(ends) <= 3 else 2
    shown = [length for length in lengths if any(line.get(length) for line in curves.values())]
    last = max((point.after for line in curves.values() for points in line.values() for point in points), default=0)
    ratios = (1.45, 1) if shown else (1,)
    rows, each = -(-len(ends) // pairs), len(ratios)
    size = (max(8.0, (4.3 if pairs == 1 else 7.2) * sum(ratios)), 3.3 * rows + 0.9)
    plt, figure, grid = _figure(rows, each * pairs, size, width_ratios=ratios * pairs)
    shades = plt.get_cmap("viridis")(np.linspace(0.0, 0.88, max(2, len(lengths))))
    colours = dict(zip(lengths, shades, strict=False))
    for number, label in enumerate(ends):
        panels = grid[number // pairs][each * (number % pairs) : each * (number % pairs) + each]
        if shown:
            _draw_curves(panels[0], curves.get(label, {}), colours, last)
        _draw_ends(panels[-1], ends[label], lengths, unit)
        panels[0].set_title(label, loc="left", fontsize=10.5, fontweight="bold")
    for axes in list(grid.flat)[each * len(ends) :]:
        axes.set_axis_off()
    figure.suptitle(f"{title}: is the gold answer in the memory?", x=0.006, ha="left", fontsize=12.5, fontweight="bold")
    lines = [plt.Line2D([], [], color=colours[length], marker="o", markersize=4, linewidth=1.8) for length in shown]
    if shown:
        names = [_length_name(length) for length in shown]
        figure.legend(lines, names, loc="outside lower left", ncols=8, frameon=False, fontsize=8, title=_line_title(unit),
                      title_fontsize=8, alignment="left", columnspacing=1.2)  # fmt: skip
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (_NEVER, _LOST, _HELD)]
    dot = plt.Line2D([], [], color="black", marker="D", markersize=5, linestyle="none", markeredgecolor="white")
    names = ["never in memory", "in memory once, then lost", "in memory at the end", f"answered right ({score})"]
    figure.legend([*patches, dot], names, loc="outside lower right", ncols=2, frameon=False, fontsize=8, title=note or None,
                  title_fontsize=8, alignment="left")  # fmt: skip
    _write(plt, figure, path)


def _draw_curves(axes, curves: Mapping[Length, Sequence[Point]], colours: Mapping[Length, object], last: int) -> None:
    percent_axis(axes)
    axes.tick_params(labelsize=8.5)
    axes.set_ylabel("gold answer in memory", fontsize=9)
    if not curves:
        axes.set_xticks([])
        reason = "the rows do not say where the evidence is"
        axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", fontsize=9, color=SOFT)
        return
    for order, (length, points) in enumerate(curves.items()):
        # log2(1 + chunks): a log axis that has a place for 0.
        x, y = [np.log2(1 + point.after) for point in points], [100 * point.held for point in points]
        style = {"marker": "o", "markersize": 4, "linewidth": 1.8, "clip_on": False}
        axes.plot(x, y, color=colours[length], zorder=3 + order / 100, **style)
    ticks = [0, 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536]
    ticks = [tick for tick in ticks if tick <= last]
    names = ["just\nread", *(short_length(tick) for tick in ticks[1:])]
    axes.set_xticks([np.log2(1 + tick) for tick in ticks], names)
    axes.set_xlim(-0.15, np.log2(1 + max(last, 1)) + 0.15)
    axes.set_xlabel("chunks read since the evidence (log scale)", fontsize=8.5, color=SOFT)


def _draw_ends(axes, ends: Mapping[Length, tuple[Kept, float]], lengths: Sequence[Length], unit: str) -> None:
    for place, length in enumerate(lengths):
        if length not in ends:
            continue
        kept, right = ends[length]
        last, ever = 100 * kept.last, 100 * max(kept.ever, kept.last)
        for low, high, colour in ((0, last, _HELD), (last, ever, _LOST), (ever, 100, _NEVER)):
            axes.bar(place, high - low, bottom=low, width=0.82, color=colour, linewidth=0)
        axes.plot(place, 100 * right, "D", color="black", markersize=5, markeredgecolor="white", clip_on=False, zorder=4)
    percent_axis(axes)
    axes.tick_params(labelsize=8.5)
    axes.tick_params(axis="x", pad=7)
    axes.grid(visible=False)
    every = -(-len(lengths) // 8)
    places = range(0, len(lengths), every)
    axes.set_xticks(places, [_length_name(lengths[place]) for place in places])
    spare = max(0.0, 3 - len(lengths)) / 2  # one bar alone does not fill the picture
    axes.set_xlim(-0.6 - spare, len(lengths) - 0.4 + spare)
    axes.set_xlabel(f"document length ({unit})" if unit else "", fontsize=8.5, color=SOFT)
    axes.set_title("after the last chunk", loc="right", fontsize=9, color=SOFT)


def plot_depths(path: Path, maps: Mapping[str, DepthMap], title: str, unit: str, score: str) -> None:
    """Write a PNG with one heat map per series: tenths of the depth downwards, lengths to the right, all on one colour scale."""
    most = max(len(depths.lengths) for depths in maps.values())
    columns = min(len(maps), 4 if most <= 5 else 3 if most <= 8 else 2 if most <= 10 or len(maps) > 3 else 1)
    rows = -(-len(maps) // columns)
    width = max(2.6, 0.44 * most + 1.0)
    size = (max(width * columns + 1.1, 6.2), 3.3 * rows + 0.8)
    plt, figure, grid = _figure(rows, columns, size)
    cmap = plt.get_cmap("viridis")
    for number, axes in enumerate(grid.flat):
        if number >= len(maps):
            axes.set_axis_off()
            continue
        label = list(maps)[number]
        _draw_map(axes, maps[label], cmap)
        axes.set_title(label, loc="left", fontsize=10, fontweight="bold")
        axes.set_xlabel(f"document length ({unit})" if unit else "", fontsize=8.5, color=SOFT)
        if number % columns == 0:
            axes.set_ylabel("depth of the evidence", fontsize=9)
    scale = plt.cm.ScalarMappable(plt.Normalize(0, 100), cmap)
    bar = figure.colorbar(scale, ax=grid, fraction=0.035, pad=0.015, ticks=range(0, 101, 20))
    bar.ax.set_yticklabels([f"{value}%" for value in range(0, 101, 20)], fontsize=8.5)
    bar.set_label(f"answered right ({score})", fontsize=9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    figure.suptitle(f"{title}: score by depth and length", x=0.006, ha="left", fontsize=12.5, fontweight="bold")
    note = f"numbers: samples in the cell; hatched: fewer than {FEW}; white: none"
    figure.supxlabel(note, fontsize=8, color=SOFT, x=0.006, ha="left")
    _write(plt, figure, path)


def _draw_map(axes, depths: DepthMap, cmap) -> None:
    from matplotlib.patches import Rectangle

    shown = np.ma.masked_invalid(100 * depths.score)
    axes.pcolormesh(shown, cmap=cmap, vmin=0, vmax=100, edgecolors="white", linewidth=1)
    for (tenth, column), count in np.ndenumerate(depths.count):
        if not count:
            continue
        red, green, blue, _ = cmap(depths.score[tenth, column])
        ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
        if count < FEW:
            box = Rectangle((column, tenth), 1, 1, fill=False, hatch="////", edgecolor=ink, linewidth=0, alpha=0.45)
            axes.add_patch(box)
        axes.text(column + 0.5, tenth + 0.5, str(count), ha="center", va="center", fontsize=6.5, color=ink)
    axes.set_xticks(np.arange(len(depths.lengths)) + 0.5, [_length_name(length) for length in depths.lengths])
    axes.set_yticks(range(0, BINS + 1, 2), [f"{100 * tenth // BINS}%" for tenth in range(0, BINS + 1, 2)])
    axes.set_ylim(BINS, 0)
    axes.set_xlim(0, len(depths.lengths))
    unframed(axes)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(labelsize=8)


def _figure(rows: int, columns: int, size: tuple[float, float], width_ratios: Sequence[float] | None = None):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(
        rows, columns, figsize=size, dpi=DPI, layout="constrained", squeeze=False, width_ratios=width_ratios
    )
    return plt, figure, grid


def _write(plt, figure, path: Path) -> None:
    fresh = path.with_name(f".{path.name}.new")
    figure.savefig(fresh, format="png", metadata={"Software": None})
    plt.close(figure)
    fresh.replace(path)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _marker(number: int) -> str:
    return MARKERS[number % len(MARKERS)]


def _style(number: int) -> str:
    return ("-", "--", ":")[number // len(COLOURS) % 3]


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """As many as fit into `width` inches: a letter takes about a twelfth of one, line and gaps two thirds."""
    return max(1, min(len(labels), 4, int(width / (max(map(len, labels)) / 12 + 0.66))))


def _legend_height(labels: Sequence[str]) -> float:
    return 0.3 + 0.22 * -(-len(labels) // 3)


def _length_name(length: Length) -> str:
    return short_length(length) if isinstance(length, int) else length


def _length_label(unit: str) -> str:
    return f"document length ({unit}, log scale)" if unit else "document length (log scale)"


def _line_title(unit: str) -> str:
    return f"lines: length in {unit}" if unit else "lines: document length"
