"""Variants of a training run against their base as one picture: accuracy with intervals, and learning curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ablation_table import Variant, accuracy, by_accuracy, change

# Of Okabe and Ito's colours, which people with any kind of colour vision tell apart; grey where a change is not certain.
_BETTER, _WORSE, _SAME, _BASE = "#0072B2", "#D55E00", "#777777", "#000000"
_COLUMNS = 4


def plot_ablations(path: str | Path, variants: Sequence[Variant], base: Variant, length: int, title: str) -> None:
    """Write a PNG: accuracy at `length` chunks by variant, and reward by step of each variant before the base's.

    Variants without a result are left out.

    Raises:
        ValueError: the base has no result.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    if not base.results:
        raise ValueError("there is nothing to plot: the base has no result")
    shown = [variant for variant in by_accuracy(variants, base, length) if variant.results]
    rows = -(-len(shown) // _COLUMNS)
    height = max(4.6, 1.35 * rows + 1.6, 0.32 * len(shown) + 1.6)
    figure = plt.figure(figsize=(14.5, height), dpi=120, layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(5.4, 9))
    _draw_accuracy(left.subplots(), shown, base, length)
    grid = right.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False)
    right.suptitle("Reward by step: mean and range over seeds; grey: base", x=0.01, ha="left", fontsize=10.5)
    for axes, variant in zip(grid.flat, shown, strict=False):
        _draw_curve(axes, variant, base, _colour(variant, base, length))
    for index, axes in enumerate(grid.flat):
        if index >= len(shown):
            axes.set_axis_off()
        elif index + _COLUMNS >= len(shown):
            axes.tick_params(labelbottom=True)
            if index // _COLUMNS == rows - 1:
                axes.set_xlabel("step", fontsize=8, color="#666666")
    figure.suptitle(title, x=0.006, ha="left", fontsize=13, fontweight="bold")
    figure.savefig(path)
    plt.close(figure)


def _colour(variant: Variant, base: Variant, length: int) -> str:
    """Blue or orange where the paired interval excludes 0 and all seeds change that way."""
    if variant is base:
        return _BASE
    difference = change(variant, base, length)
    if difference is not None and difference.low > 0 and difference.least > 0:
        return _BETTER
    if difference is not None and difference.high < 0 and difference.most < 0:
        return _WORSE
    return _SAME


def _draw_accuracy(axes, shown: Sequence[Variant], base: Variant, length: int) -> None:
    reference = 100 * accuracy([result.right[length] for result in base.results.values()]).mean
    axes.axvline(reference, color="#999999", linewidth=1, linestyle=(0, (3, 3)), zorder=1)
    for place, variant in enumerate(shown):
        rights = [result.right[length] for result in variant.results.values()]
        estimate, colour = accuracy(rights), _colour(variant, base, length)
        axes.plot([100 * estimate.low, 100 * estimate.high], [place, place], color=colour, linewidth=2.2, zorder=2)
        axes.plot(100 * estimate.mean, place, "o", color=colour, markersize=7, zorder=4)
        seeds = [100 * sum(right) / len(right) for right in rights]
        axes.plot(seeds, [place + 0.24] * len(seeds), "|", color=colour, markersize=6, alpha=0.8, zorder=3, clip_on=False)
        if before := [result.before[length] for result in variant.results.values() if result.before]:
            axes.plot(100 * accuracy(before).mean, place, "x", color="#999999", markersize=6, zorder=3, clip_on=False)
    axes.set_yticks(range(len(shown)), [variant.name for variant in shown], fontsize=9.5)
    axes.set_ylim(len(shown) - 0.4, -0.7)
    axes.set_xlim(-1.5, 101.5)
    axes.set_xticks(range(0, 101, 20), [f"{value}%" for value in range(0, 101, 20)])
    axes.set_title(f"Answered right at {length} chunks", loc="left", fontsize=10.5)
    axes.set_xlabel(
        "bar: 95% over documents, |: seeds, x: its own start\nblue, orange: above, below the base (paired, all seeds agree)",
        fontsize=8,
        color="#666666",
    )
    _dress(axes, "x")


def _draw_curve(axes, variant: Variant, base: Variant, colour: str) -> None:
    if variant is not base:
        axes.plot(*_band(base)[:2], color="#b5b5b5", linewidth=1.6, zorder=2)
    steps, mean, low, high = _band(variant)
    axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0, zorder=1)
    axes.plot(steps, mean, color=colour, linewidth=1.7, zorder=3)
    axes.set_title(variant.name, loc="left", fontsize=9, pad=3)
    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks((0, 0.5, 1))
    _dress(axes, "y")


def _band(variant: Variant) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps, and the seeds' mean, lowest and highest reward at each step that all have."""
    columns = list(zip(*(result.rewards for result in variant.results.values()), strict=False))
    mean = [math.fsum(column) / len(column) for column in columns]
    return list(range(1, len(columns) + 1)), mean, [min(column) for column in columns], [max(column) for column in columns]


def _dress(axes, grid: str) -> None:
    axes.grid(axis=grid, color="#e8e8e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors="#444444", labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#999999")
