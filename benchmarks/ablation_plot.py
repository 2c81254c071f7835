"""Draw variants of a training run against their base: accuracy with intervals, and learning curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ablation_table import Variant, accuracy, by_accuracy, change
from memrl.utils import pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 4
_FAINT = "#999999"


def plot_ablations(path: str | Path, variants: Sequence[Variant], base: Variant, length: int, title: str) -> None:
    """Write a PNG: accuracy at `length` chunks by variant, and reward by step of each variant over the base's.

    Variants without a result are left out.

    Raises:
        ValueError: the base has no result.
    """
    if not base.results:
        raise ValueError("there is nothing to plot: the base has no result")
    shown = [variant for variant in by_accuracy(variants, base, length) if variant.results]
    rows = -(-len(shown) // _COLUMNS)
    figure = pictures.make_figure((14.5, max(4.6, 1.35 * rows + 1.6, 0.32 * len(shown) + 1.6)))
    left, right = figure.add_gridspec(1, 2, width_ratios=(5.4, 9))
    left_part, right_part = figure.add_subfigure(left), figure.add_subfigure(right)
    _draw_accuracy(left_part.subplots(), shown, base, length)
    grid = list(right_part.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False).flat)
    right_part.suptitle("Reward by step: mean and range over seeds; grey: base", x=0.01, ha="left", fontsize=10.5)
    for axes, variant in zip(grid, shown, strict=False):
        _draw_curve(axes, variant, base, _colour(variant, base, length))
    for index, axes in enumerate(grid):
        if index >= len(shown):
            axes.set_axis_off()
        elif index + _COLUMNS >= len(shown):
            axes.tick_params(labelbottom=True)
            if index // _COLUMNS == rows - 1:
                pictures.axis_labels(axes, x="step")
    pictures.figure_title(figure, title)
    pictures.save(figure, path)


def _colour(variant: Variant, base: Variant, length: int) -> str:
    """The colour of "better" or "worse" only if the paired interval excludes 0 and all seeds change in that direction."""
    if variant is base:
        return pictures.REFERENCE
    difference = change(variant, base, length)
    if difference is not None and difference.low > 0 and difference.least > 0:
        return pictures.BETTER
    if difference is not None and difference.high < 0 and difference.most < 0:
        return pictures.WORSE
    return pictures.SAME


def _draw_accuracy(axes: Axes, shown: Sequence[Variant], base: Variant, length: int) -> None:
    reference = 100 * accuracy([result.right[length] for result in base.results.values()]).mean
    axes.axvline(reference, color=_FAINT, linewidth=1, linestyle=(0, (3, 3)), zorder=1)
    for place, variant in enumerate(shown):
        rights = [result.right[length] for result in variant.results.values()]
        estimate, colour = accuracy(rights), _colour(variant, base, length)
        axes.plot([100 * estimate.low, 100 * estimate.high], [place, place], color=colour, linewidth=2.2, zorder=2)
        axes.plot(100 * estimate.mean, place, "o", color=colour, markersize=7, zorder=4, clip_on=False)
        seeds = [100 * sum(right) / len(right) for right in rights]
        axes.plot(seeds, [place + 0.24] * len(seeds), "|", color=colour, markersize=6, alpha=0.8, zorder=3, clip_on=False)
        if before := [result.before[length] for result in variant.results.values() if result.before]:
            axes.plot(100 * accuracy(before).mean, place, "x", color=_FAINT, markersize=6, zorder=3, clip_on=False)
    pictures.percent_axis(axes, "x")
    axes.set_yticks(range(len(shown)), [pictures.literal(variant.name) for variant in shown])
    axes.set_ylim(len(shown) - 0.4, -0.7)
    axes.set_title(f"Answered right at {length} chunks", loc="left", fontsize=10.5)
    bars = "bar: 95% interval over documents; |: seeds; x: before RL"
    pictures.axis_labels(axes, x=f"{bars}\nblue, orange: above, below the base (paired, all seeds agree)")


def _draw_curve(axes: Axes, variant: Variant, base: Variant, colour: str) -> None:
    if variant is not base:
        axes.plot(*_rewards(base)[:2], color="#b5b5b5", linewidth=1.6, zorder=2)
    steps, mean, low, high = _rewards(variant)
    pictures.draw_band(axes, steps, low, high, colour)
    axes.plot(steps, mean, color=colour, linewidth=1.7, zorder=3)
    pictures.panel_title(axes, variant.name)
    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks((0, 0.5, 1))
    pictures.clean_frame(axes, "y")


def _rewards(variant: Variant) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps, and the mean, lowest and highest reward over seeds at each step that all seeds have."""
    columns = list(zip(*(result.rewards for result in variant.results.values()), strict=False))
    mean = [math.fsum(column) / len(column) for column in columns]
    return list(range(1, len(columns) + 1)), mean, [min(column) for column in columns], [max(column) for column in columns]
