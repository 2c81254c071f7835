"""One look for all pictures: colours, axes, intervals, labels and saving. matplotlib is imported when a figure is made."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memrl.utils.files import replacing
from memrl.utils.plain_text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# The palette of Okabe and Ito, which is safe for colour-blind readers. The first series (the baseline, "before RL") is always
# blue and the second ("after RL") always vermilion.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
MARKERS = "os^Dv*Ph"
RETAINED, LOST, NEVER = "#0072B2", "#E69F00", "#DDDDDD"  # gold answers in memory
BETTER, WORSE, SAME = "#0072B2", "#D55E00", "#777777"  # than a baseline
REFERENCE = "#000000"  # the baseline itself
SOFT = "#666666"  # axis labels and notes
SCORE_MAP = "viridis"  # colour map of scores from 0 to 1
DPI = 130
LONGEST_NAME = 80  # characters; more do not fit above the panels
MARK = b"Software\0memrl"  # in the first bytes of our PNG files

_TITLE, _PANEL_TITLE, _LABEL, _TICKS, _NOTE = 12.5, 10.5, 8.5, 8.5, 8.0  # font sizes in points


def make_figure(size: tuple[float, float]) -> Figure:
    """An empty figure of `size` inches that keeps its parts from overlapping; no window system, no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, dpi=DPI, layout="constrained")


def make_panels(count: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure and its first `count` panels, row by row; the places left over stay empty. Options are those of `subplots`."""
    figure = make_figure(size)
    panels = list(figure.subplots(-(-count // columns), columns, squeeze=False, **options).flat)
    for unused in panels[count:]:
        unused.set_axis_off()
    return figure, panels[:count]


def save(figure: Figure, path: str | Path) -> None:
    """Write a PNG, whole or not at all; equal figures give equal bytes."""
    with replacing(Path(path)) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # of a name in Chinese, for example: shown as a box
        figure.savefig(file, format="png", metadata={"Software": "memrl"})


def literal(text: str) -> str:
    """`text` in one line, as matplotlib shows it unchanged: a dollar sign begins no formula, and "_" hides no label."""
    shown, half = printable(text, 1000), LONGEST_NAME // 2
    shown = shown if len(shown) <= LONGEST_NAME else f"{shown[:half]}...{shown[3 - half :]}"  # paths differ at their ends
    return (f" {shown}" if shown.startswith("_") else shown).replace("$", r"\$")


def series_style(number: int) -> dict[str, Any]:
    """Colour, marker and line of a series by its number; the first 24 differ."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": ("-", "--", ":")[number // len(COLOURS) % 3],
        "linewidth": 1.9,
        "markersize": 5.5,
    }


def legend_line(**style: Any) -> Line2D:
    """A sample of a line for a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **style)


def draw_band(axes: Axes, x: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str) -> None:
    """Shade the intervals of a line."""
    axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0, zorder=1)


def figure_title(figure: Figure, text: str) -> None:
    figure.suptitle(literal(text), x=0.006, ha="left", fontsize=_TITLE, fontweight="bold")


def panel_title(axes: Axes, text: str) -> None:
    axes.set_title(literal(text), loc="left", fontsize=_PANEL_TITLE, fontweight="bold")


def axis_labels(axes: Axes, x: str = "", y: str = "") -> None:
    if x:
        axes.set_xlabel(x, fontsize=_LABEL, color=SOFT)
    if y:
        axes.set_ylabel(y, fontsize=_LABEL, color=SOFT)


def note(figure: Figure, text: str) -> None:
    """A line below the panels, at the right."""
    figure.supxlabel(text, fontsize=_NOTE, color=SOFT, x=0.995, ha="right")


def clean_frame(axes: Axes, grid: Literal["x", "y", ""] = "") -> None:
    """Remove tick marks and the frame except its lower line; `grid` is the axis whose ticks get light lines."""
    if grid:
        axes.grid(axis=grid, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, colors="#444444", labelsize=_TICKS)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#999999")


def percent_axis(axes: Axes, which: Literal["x", "y"] = "y") -> None:
    """0% to 100% with light lines."""
    ticks = range(0, 101, 20)
    axes.set(**{f"{which}lim": (0, 100), f"{which}ticks": ticks, f"{which}ticklabels": [f"{tick}%" for tick in ticks]})
    clean_frame(axes, which)


def length_axis(axes: Axes, lengths: Sequence[int], unit: str, max_labels: int = 14) -> None:
    """A log2 axis of document lengths with about `max_labels` of them as labels that do not overlap."""
    lengths = sorted(set(lengths))
    ratio = max(1.3, 0.999 * (lengths[-1] / lengths[0]) ** (1 / max_labels))
    labelled = [lengths[0]]
    for length in lengths[1:]:
        if length >= ratio * labelled[-1]:
            labelled.append(length)
    axes.set_xscale("log", base=2)
    axes.set_xticks(labelled, [length_name(length) for length in labelled], minor=False)
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="x", pad=7)  # markers at 0% reach below the axis
    if len(lengths) == 1:  # matplotlib's own limits around one point are arbitrary
        axes.set_xlim(lengths[0] / 2, 2 * lengths[0])
    axis_labels(axes, x=f"document length ({unit}, log scale)" if unit else "document length (log scale)")


def length_name(length: int | str) -> str:
    """4096 as 4K, 1048576 as 1M: K and M are powers of 1024. Short and round numbers stay (512, 1536, 25600), and names do."""
    for size, suffix in ((1024**2, "M"), (1024, "K")):
        if isinstance(length, int) and length >= size and length % size == 0 and length % 100:
            return f"{length // size}{suffix}"
    return str(length)
