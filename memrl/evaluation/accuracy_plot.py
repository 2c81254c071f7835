"""Accuracy by document length as a picture, and what all pictures of results have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which people with any kind of colour vision tell apart; the markers differ as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
MARKERS = "os^Dv*Ph"
SOFT = "#666666"


def plot_accuracy(
    path: str | Path,
    series: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    score: str = "strict",
    unit: str = "chunks",
    title: str = "Accuracy by document length",
    trained_to: int | None = None,
) -> None:
    """Write a PNG: one line with its 95% band per series, over document lengths on a log2 axis.

    Args:
        series: entries of `summarize` by the name in the picture, e.g. {"before RL": ..., "after RL": ...}.
        score: "strict" or "lenient".
        unit: what the lengths count.
        trained_to: the longest document of training, marked where given.

    Raises:
        ValueError: no entry has a length that is a number.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines = {name: [e for e in entries if isinstance(e["length"], int)] for name, entries in series.items()}
    lines = {name: sorted(entries, key=lambda e: e["length"]) for name, entries in lines.items() if entries}
    if not lines:
        raise ValueError("there is nothing to plot: no length is a number")
    lengths = sorted({entry["length"] for entries in lines.values() for entry in entries})
    figure, axes = plt.subplots(figsize=(7.5, 4.4), dpi=160, layout="constrained")
    for number, (name, entries) in enumerate(lines.items()):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        x = [entry["length"] for entry in entries]
        low, high = zip(*(entry[f"{score}_interval"] for entry in entries), strict=True)
        y = [100 * entry[score] for entry in entries]
        band = ([100 * bound for bound in low], [100 * bound for bound in high])
        axes.fill_between(x, *band, color=colour, alpha=0.15, linewidth=0)
        style = {"color": colour, "marker": marker, "markersize": 5.5, "linewidth": 2}
        axes.plot(x, y, label=name, clip_on=False, zorder=3, **style)
    _finish(axes, lengths, score, unit, title, len(lines), trained_to)
    figure.savefig(path)
    plt.close(figure)


def _finish(axes, lengths: list[int], score: str, unit: str, title: str, num_lines: int, trained_to: int | None) -> None:
    length_axis(axes, lengths)
    percent_axis(axes)
    axes.set_xlabel(f"document length ({unit}, log scale)")
    axes.set_ylabel(f"answered right ({score})")
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=12)
    if trained_to is not None:
        axes.axvline(trained_to, color="#888888", linestyle=(0, (3, 3)), linewidth=1, zorder=1)
        axes.annotate(
            f"trained up to {short_length(trained_to)} {unit}",
            (trained_to, 50),
            xytext=(5, 0),
            textcoords="offset points",
            color="#666666",
            fontsize=8.5,
        )
    if num_lines > 1:
        axes.legend(frameon=False, loc="best", fontsize=9.5)
    note = {"ha": "right", "fontsize": 7.5, "color": "#888888"}
    axes.annotate("bands: 95% intervals", (1, -0.135), xycoords="axes fraction", **note)


def length_axis(axes, lengths: Sequence[int], most: int = 14) -> None:
    """A log2 axis with about `most` of the lengths as its labels, none of which run into each other."""
    lengths = sorted(set(lengths))
    ratio = max(1.3, 0.999 * (lengths[-1] / lengths[0]) ** (1 / most))
    labelled = [lengths[0]]
    for length in lengths[1:]:
        if length >= ratio * labelled[-1]:
            labelled.append(length)
    axes.set_xscale("log", base=2)
    axes.set_xticks(labelled, [short_length(length) for length in labelled], minor=False)
    axes.set_xticks([], minor=True)
    if len(lengths) == 1:  # a log axis around one point would go by its own taste
        axes.set_xlim(lengths[0] / 2, 2 * lengths[0])


def percent_axis(axes) -> None:
    """0 to 100 with light lines, and no frame but the one below."""
    axes.set_ylim(0, 100)
    axes.set_yticks(range(0, 101, 20), [f"{v}%" for v in range(0, 101, 20)])
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    unframed(axes)


def unframed(axes) -> None:
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors="#444444")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#999999")


def short_length(length: int) -> str:
    """4096 as 4K, 1048576 as 1M: K and M are powers of 1024. What is short or round as it is stays: 512, 1536, 25600."""
    for size, suffix in ((1024**2, "M"), (1024, "K")):
        if length >= size and length % size == 0 and length % 100:
            return f"{length // size}{suffix}"
    return str(length)
