"""Learning curves of a run, or of several in one picture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from memrl.utils.jsonlines import read_records

# Okabe and Ito's colours, which people with any kind of colour vision tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1, 1, 1)))
_COLUMNS = 3
LOG_SPAN = 30.0  # values that differ by more than this factor are read better on a log axis


class Panel(NamedTuple):
    """One small picture: its title, its lines (name of the metric, name in the legend), and what the axis may be."""

    title: str
    lines: tuple[tuple[str, str], ...]
    scale: str = "linear"  # "linear", "share" (0 to 1), or "log" where the values span enough


_PANELS = (
    Panel(
        "Reward",
        (
            ("reward/strict", "strict"),
            ("reward/lenient", "lenient"),
            ("validation/strict", "validation, strict"),
            ("validation/lenient", "validation, lenient"),
        ),
        "share",
    ),
    Panel(
        "Reward that is maximised",
        (("reward/mean", "reward"), ("validation/reward", "validation"), ("reward/penalty", "overlong penalty")),
    ),
    Panel("Groups with signal", (("reward/signal", ""),), "share"),
    Panel(
        "Response tokens per turn",
        (
            ("rollout/memory_tokens", "memory"),
            ("rollout/answer_tokens", "answer"),
            ("rollout/response_tokens", "all"),
        ),
    ),
    Panel(
        "Turns cut off by the cap",
        (
            ("rollout/truncated_memory", "memory"),
            ("rollout/truncated_answer", "answer"),
            ("rollout/truncated", "all"),
        ),
    ),
    Panel("KL to the frozen start", (("loss/kl", ""),), "log"),
    Panel("Entropy", (("loss/entropy", ""),)),
    Panel("Gradient norm", (("optim/grad_norm", ""),), "log"),
    Panel("Clipped tokens", (("loss/clip_frac", "ratio"), ("loss/dual_clip_frac", "dual"))),
    Panel(
        "Trainer - sampler, log-probability",
        (("rollout/logprob_diff_mean", "mean"), ("rollout/logprob_diff_max", "largest"), ("rollout/mismatch_kl", "KL")),
        "log",
    ),
)
VALIDATION = "validation/"


@dataclass
class Curves:
    """A run's metrics: the values of each by step, NaN where there was none."""

    label: str
    series: dict[str, tuple[list[int], list[float]]]


def plot_curves(run_dir: str | Path) -> Path | None:
    """Write `curves.png` into a run's folder; returns its path, or None where no step was logged.

    Raises:
        ValueError: metrics.jsonl or validation.jsonl is damaged.
    """
    if not (Path(run_dir) / "metrics.jsonl").exists():
        return None
    run = read_curves(run_dir)
    if not any(steps for steps, _ in run.series.values()):
        return None
    path = Path(run_dir) / "curves.png"
    draw([run], path)
    return path


def read_curves(run_dir: str | Path, label: str | None = None) -> Curves:
    """The series of metrics.jsonl, and as "validation/NAME" those of validation.jsonl.

    Raises:
        ValueError: there is no metrics.jsonl, or a line of either is damaged.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give a run's folder, which holds metrics.jsonl")
    series: dict[str, tuple[list[int], list[float]]] = {}
    for name, prefix in (("metrics.jsonl", ""), ("validation.jsonl", VALIDATION)):
        path = folder / name
        if prefix and not path.exists():
            continue
        for number, record in read_records(path):
            step = record.get("step")
            if not isinstance(step, int):
                raise ValueError(f"{path}, line {number} has no whole number as its step")
            for key, value in record.items():
                if key != "step" and (value is None or isinstance(value, int | float)):
                    steps, values = series.setdefault(prefix + key, ([], []))
                    steps.append(step)
                    values.append(math.nan if value is None else float(value))
    return Curves(folder.resolve().name if label is None else label, series)


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    """Each value's mean with its neighbours up to window // 2 on either side; values that are not finite are passed over.

    Returns:
        float64, as long as `values`; NaN where no neighbour is finite.
    """
    given = np.asarray(values, dtype=np.float64)
    is_finite, ones = np.isfinite(given), np.ones(2 * (window // 2) + 1)
    half = len(ones) // 2
    sums, counts = (
        np.convolve(part, ones)[half : half + len(given)] for part in (np.where(is_finite, given, 0.0), is_finite.astype(float))
    )
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def draw(runs: Sequence[Curves], path: Path) -> None:
    """Write the PNG, whole or not at all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [panel for panel in _PANELS if any(_drawable(run, name) for run in runs for name, _ in panel.lines)]
    rows = -(-max(len(panels), 1) // _COLUMNS)
    figure, grid = plt.subplots(
        rows, _COLUMNS, figsize=(4.3 * _COLUMNS, 2.7 * rows + 0.7), dpi=120, layout="constrained", squeeze=False
    )
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel, runs)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    if len(runs) == 1:
        figure.suptitle(runs[0].label, x=0.01, ha="left", fontsize=13, fontweight="bold")
    else:
        handles = [plt.Line2D([], [], color=_COLOURS[i % len(_COLOURS)], linewidth=2.5) for i in range(len(runs))]
        labels = [run.label for run in runs]
        figure.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False, fontsize=10)
    fresh = path.with_name(f".{path.name}.new")
    figure.savefig(fresh, format="png")
    plt.close(figure)
    os.replace(fresh, path)


def _drawable(run: Curves, name: str) -> bool:
    values = run.series.get(name, ((), ()))[1]
    scope, _, kind = name.partition("/")
    if kind in ("mean", "reward") and values == run.series.get(f"{scope}/strict", ((), ()))[1]:
        return False  # with the strict verifier as the reward this would be the same line again
    return any(math.isfinite(value) and (value != 0 or name != "reward/penalty") for value in values)


def _draw_panel(axes, panel: Panel, runs: Sequence[Curves]) -> None:
    lines = [(name, label) for name, label in panel.lines if any(_drawable(run, name) for run in runs)]
    if len(lines) > 2 and lines[-1][1] == "all":
        lines.pop()  # the kinds of turn say more than their mean
    drawn: list[float] = []
    for run_number, run in enumerate(runs):
        for line_number, (name, _) in enumerate(lines):
            if _drawable(run, name):
                colour = _COLOURS[(run_number if len(runs) > 1 else line_number) % len(_COLOURS)]
                style = _STYLES[line_number % len(_STYLES)] if len(runs) > 1 else "-"
                steps, values = run.series[name]
                order = 3 - 0.1 * line_number  # where two lines are equal, the first is seen
                _draw_line(axes, steps, values, name.startswith(VALIDATION), color=colour, linestyle=style, zorder=order)
                drawn += [value for value in values if math.isfinite(value)]
    _dress(axes, panel, drawn)
    if len(lines) > 1:
        from matplotlib.lines import Line2D

        handles = [
            Line2D([], [], color="#555555", linestyle=_STYLES[i % len(_STYLES)], linewidth=1.8)
            if len(runs) > 1
            else Line2D([], [], color=_COLOURS[i % len(_COLOURS)], linewidth=2)
            for i in range(len(lines))
        ]
        axes.legend(handles, [label for _, label in lines], frameon=False, fontsize=7.5, loc="best")


def _draw_line(axes, steps: list[int], values: list[float], is_sparse: bool, **style) -> None:
    window = len(values) // 12
    if is_sparse or window < 2:
        axes.plot(steps, values, linewidth=1.6, marker="o", markersize=3, **style)
        return
    axes.plot(steps, values, linewidth=0.7, alpha=0.3, **style | {"linestyle": "-"})
    axes.plot(steps, smooth(values, window), linewidth=2, **style)


def _dress(axes, panel: Panel, drawn: list[float]) -> None:
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
    positive = [value for value in drawn if value > 0]
    if panel.scale == "share":
        axes.set_ylim(-0.02, 1.02)
    elif panel.scale == "log" and positive and max(positive) > LOG_SPAN * min(positive):
        axes.set_yscale("log", nonpositive="mask")
    elif drawn and min(drawn) >= 0:
        axes.set_ylim(0, 1.08 * max(drawn) or 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step", fontsize=8, color="#666666")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, labelsize=8, colors="#444444")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#999999")
