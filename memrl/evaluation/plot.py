"""Accuracy by document length as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which people with any kind of colour vision tell apart; the markers differ as well.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "os^Dv*"


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
        colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
        x = [entry["length"] for entry in entries]
        low, high = zip(*(entry[f"{score}_interval"] for entry in entries), strict=True)
        y = [100 * entry[score] for entry in entries]
        band = ([100 * bound for bound in low], [100 * bound for bound in high])
        axes.fill_between(x, *band, color=colour, alpha=0.15, linewidth=0)
        style = {"color": colour, "marker": marker, "markersize": 5.5, "linewidth": 2}
        axes.plot(x, y, label=name, clip_on=False, zorder=3, **style)
    _dress(axes, lengths, score, unit, title, len(lines), trained_to)
    figure.savefig(path)
    plt.close(figure)


def _dress(axes, lengths: list[int], score: str, unit: str, title: str, num_lines: int, trained_to: int | None) -> None:
    axes.set_xscale("log", base=2)
    labelled = [lengths[0]]
    for length in lengths[1:]:
        if length >= 1.3 * labelled[-1]:  # closer labels would run into each other
            labelled.append(length)
    axes.set_xticks(labelled, [_short_length(length) for length in labelled], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, 100)
    axes.set_yticks(range(0, 101, 20), [f"{v}%" for v in range(0, 101, 20)])
    axes.set_xlabel(f"document length ({unit}, log scale)")
    axes.set_ylabel(f"answered right ({score})")
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=12)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors="#444444")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#999999")
    if trained_to is not None:
        axes.axvline(trained_to, color="#888888", linestyle=(0, (3, 3)), linewidth=1, zorder=1)
        axes.annotate(
            f"trained up to {_short_length(trained_to)} {unit}",
            (trained_to, 3),
            xytext=(5, 0),
            textcoords="offset points",
            color="#666666",
            fontsize=8.5,
        )
    if num_lines > 1:
        axes.legend(frameon=False, loc="best", fontsize=9.5)
    note = {"ha": "right", "fontsize": 7.5, "color": "#888888"}
    axes.annotate("bands: 95% Wilson intervals", (1, -0.135), xycoords="axes fraction", **note)


def _short_length(length: int) -> str:
    for size, suffix in ((1024**2, "M"), (1024, "K")):
        if length >= 2 * size and length % size == 0:
            return f"{length // size}{suffix}"
    return str(length)
