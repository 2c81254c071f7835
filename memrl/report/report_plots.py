"""Draw the report's pictures of one task: gold answers in memory by chunk, and scores by depth and length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memrl.evaluation.tasks import Length
from memrl.report.report_numbers import BINS, MIN_SAMPLES, DepthMap, TaskNumbers
from memrl.report.series import sort_lengths
from memrl.utils import pictures
from memrl.utils.pictures import LOST, NEVER, RETAINED, SOFT, axis_labels, legend_line, length_name, literal, panel_title

_SMALL = {"frameon": False, "fontsize": 8, "title_fontsize": 8, "alignment": "left"}


def plot_retention(path: Path, task: TaskNumbers, score: str) -> None:
    """Write a PNG with two panels per series: the gold answer in memory by chunks since the evidence, and at the end."""
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    lengths = sort_lengths(length for line in task.memory.values() for length in line)
    with_curve = [length for length in lengths if any(length in line for line in task.retention.values())]
    longest = max((point["after"] for line in task.retention.values() for points in line.values() for point in points), default=0)
    ratios = (1.45, 1.0) if with_curve else (1.0,)
    pairs = 1 if len(task.memory) <= 3 else 2  # series side by side
    rows, each = -(-len(task.memory) // pairs), len(ratios)
    size = (max(8.0, (4.3 if pairs == 1 else 7.2) * sum(ratios)), 3.3 * rows + 0.9)
    figure, grid = pictures.make_panels(each * len(task.memory), each * pairs, size, width_ratios=ratios * pairs)
    shades = np.linspace(0.0, 0.88, max(2, len(lengths)))  # from dark to light as the lengths grow
    colours = dict(zip(lengths, colormaps[pictures.SCORE_MAP](shades), strict=False))
    for number, label in enumerate(task.memory):
        panels = grid[each * number : each * number + each]
        if with_curve:
            _draw_curves(panels[0], task.retention[label], colours, longest)
        _draw_end(panels[-1], task, label, lengths)
        panel_title(panels[0], label)
    pictures.figure_title(figure, f"{task.name}: is the gold answer in the memory?")
    if with_curve:
        lines = [legend_line(color=colours[length], marker="o", markersize=4, linewidth=1.8) for length in with_curve]
        title = f"lines: length in {task.unit}" if task.unit else "lines: document length"
        names = [literal(length_name(length)) for length in with_curve]
        figure.legend(lines, names, loc="outside lower left", ncols=8, columnspacing=1.2, title=title, **_SMALL)
    bars = [Patch(color=colour) for colour in (NEVER, LOST, RETAINED)]
    diamond = legend_line(color="black", marker="D", markersize=5, linestyle="none", markeredgecolor="white")
    names = ["never in memory", "in memory once, then lost", "in memory at the end", f"answered right ({score})"]
    figure.legend([*bars, diamond], names, loc="outside lower right", ncols=2, title=task.left_out() or None, **_SMALL)
    pictures.save(figure, path)


def _draw_curves(axes: pictures.Axes, curves: Mapping[Length, list[dict]], colours: Mapping[Length, Any], longest: float) -> None:
    pictures.percent_axis(axes)
    axis_labels(axes, y="gold answer in memory")
    if not curves:
        axes.set_xticks([])
        text = "the place of the evidence is not recorded"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", fontsize=9, color=SOFT)
        return
    for order, (length, points) in enumerate(curves.items()):
        # log2(1 + chunks): a log axis with a place for 0.
        x, y = [np.log2(1 + point["after"]) for point in points], [100 * point["held"] for point in points]
        style = {"marker": "o", "markersize": 4, "linewidth": 1.8, "clip_on": False}
        axes.plot(x, y, color=colours[length], zorder=3 + order / 100, **style)
    ticks = [tick for tick in (0, *(4**k for k in range(9))) if tick <= longest]
    axes.set_xticks([np.log2(1 + tick) for tick in ticks], ["just\nread", *map(length_name, ticks[1:])])
    axes.set_xlim(-0.15, np.log2(1 + max(longest, 1)) + 0.15)
    axis_labels(axes, x="chunks read since the evidence (log scale)")


def _draw_end(axes: pictures.Axes, task: TaskNumbers, label: str, lengths: Sequence[Length]) -> None:
    for length, end in task.memory[label].items():
        place, last, ever = lengths.index(length), 100 * end["last"], 100 * end["ever"]
        for low, high, colour in ((0, last, RETAINED), (last, ever, LOST), (ever, 100, NEVER)):
            axes.bar(place, high - low, bottom=low, width=0.82, color=colour, linewidth=0)
        mean = 100 * task.answered[label][length].mean
        axes.plot(place, mean, "D", color="black", markersize=5, markeredgecolor="white", clip_on=False, zorder=4)
    pictures.percent_axis(axes)
    axes.tick_params(axis="x", pad=7)
    axes.grid(visible=False)
    places = range(0, len(lengths), -(-len(lengths) // 8))
    axes.set_xticks(places, [literal(length_name(lengths[place])) for place in places])
    spare = max(0.0, 3 - len(lengths)) / 2  # keep a single bar narrow
    axes.set_xlim(-0.6 - spare, len(lengths) - 0.4 + spare)
    axis_labels(axes, x=f"document length ({task.unit})" if task.unit else "")
    axes.set_title("after the last chunk", loc="right", fontsize=9, color=SOFT)


def plot_depths(path: Path, task: TaskNumbers, score: str) -> None:
    """Write a PNG with one heat map per series: tenths of the depth downwards, lengths to the right, all on one colour scale."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    maps = task.depths
    widest = max(len(depths.lengths) for depths in maps.values())
    columns = min(len(maps), 4 if widest <= 5 else 3 if widest <= 8 else 2 if widest <= 10 or len(maps) > 3 else 1)
    width = max(2.6, 0.44 * widest + 1.0)
    size = (max(width * columns + 1.1, 6.2), 3.3 * -(-len(maps) // columns) + 0.8)
    figure, grid = pictures.make_panels(len(maps), columns, size)
    x_label = f"document length ({task.unit})" if task.unit else ""
    for number, (axes, (label, depths)) in enumerate(zip(grid, maps.items(), strict=True)):
        _draw_map(axes, depths)
        panel_title(axes, label)
        axis_labels(axes, x_label, "" if number % columns else "depth of the evidence")
    ticks = range(0, 101, 20)
    scale = ScalarMappable(Normalize(0, 100), pictures.SCORE_MAP)
    bar = figure.colorbar(scale, ax=figure.axes, fraction=0.035, pad=0.015, ticks=ticks)
    bar.set_ticklabels([f"{value}%" for value in ticks], fontsize=8.5)
    bar.set_label(f"answered right ({score})", fontsize=8.5, color=SOFT)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    pictures.figure_title(figure, f"{task.name}: score by depth and length")
    pictures.note(figure, f"numbers: samples in the cell; hatched: fewer than {MIN_SAMPLES}; white: none")
    pictures.save(figure, path)


def _draw_map(axes: pictures.Axes, depths: DepthMap) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colours = colormaps[pictures.SCORE_MAP]
    axes.pcolormesh(np.ma.masked_invalid(100 * depths.score), cmap=colours, vmin=0, vmax=100, edgecolors="white", linewidth=1)
    for (tenth, column), count in np.ndenumerate(depths.count):
        if not count:
            continue
        red, green, blue, _ = colours(depths.score[tenth, column])
        ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
        if count < MIN_SAMPLES:
            hatch = {"fill": False, "hatch": "////", "edgecolor": ink, "linewidth": 0, "alpha": 0.45}
            axes.add_patch(Rectangle((column, tenth), 1, 1, **hatch))
        axes.text(column + 0.5, tenth + 0.5, str(count), ha="center", va="center", fontsize=6.5, color=ink)
    names = [literal(length_name(length)) for length in depths.lengths]
    axes.set_xticks(np.arange(len(depths.lengths)) + 0.5, names)
    axes.set_yticks(range(0, BINS + 1, 2), [f"{100 * tenth // BINS}%" for tenth in range(0, BINS + 1, 2)])
    axes.set(xlim=(0, len(depths.lengths)), ylim=(BINS, 0))
    pictures.clean_frame(axes)
    axes.spines["bottom"].set_visible(False)
