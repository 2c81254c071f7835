"""Learning curves of a run, or of several in one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from memrl.utils import pictures
from memrl.utils.journal import read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1, 1, 1)))
_COLUMNS = 3
LOG_SPAN = 30.0  # values that differ by more than this factor are drawn on a log axis


class Panel(NamedTuple):
    """One of the small pictures: its title, its lines (name in the legend by metric), and its vertical axis."""

    title: str
    lines: dict[str, str]
    scale: str = "linear"  # "linear", "share" (0 to 1), or "log" where the values span LOG_SPAN


_PANELS = (
    Panel("Reward", {"reward/strict": "strict", "reward/lenient": "lenient", "validation/strict": "validation, strict",
                     "validation/lenient": "validation, lenient"}, "share"),
    Panel("Training reward", {"reward/mean": "reward", "validation/reward": "validation", "reward/penalty": "overlong penalty"}),
    Panel("Groups with signal", {"reward/signal": ""}, "share"),
    Panel("Response tokens per turn", {"rollout/memory_tokens": "memory", "rollout/answer_tokens": "answer",
                                       "rollout/response_tokens": "all"}),
    Panel("Turns cut off by the cap", {"rollout/truncated_memory": "memory", "rollout/truncated_answer": "answer",
                                       "rollout/truncated": "all"}),
    Panel("KL to the frozen start", {"loss/kl": ""}, "log"),
    Panel("Entropy", {"loss/entropy": ""}),
    Panel("Gradient norm", {"optim/grad_norm": ""}, "log"),
    Panel("Clipped tokens", {"loss/clip_frac": "ratio", "loss/dual_clip_frac": "dual"}),
    Panel("Trainer - sampler, log-probability", {"rollout/logprob_diff_mean": "mean", "rollout/logprob_diff_max": "largest",
                                                 "rollout/mismatch_kl": "KL"}, "log"),
)  # fmt: skip
VALIDATION = "validation/"
MAX_STEP, MAX_VALUE = 10**12, 1e30  # matplotlib fails beyond about 1e300; a run has at most some 1e6 steps


@dataclass
class Curves:
    """A run's metrics: steps and values of each, NaN where a value is missing."""

    label: str
    series: dict[str, tuple[list[int], list[float]]]


def plot_curves(run_dir: str | Path) -> Path | None:
    """Write `curves.png` into a run's folder; returns its path, or None if no step was logged.

    Raises:
        ValueError: metrics.jsonl or validation.jsonl is damaged.
    """
    if not (Path(run_dir) / "metrics.jsonl").exists() or not (run := read_curves(run_dir)).series:
        return None
    path = Path(run_dir) / "curves.png"
    draw([run], path)
    return path


def read_curves(run_dir: str | Path, label: str | None = None) -> Curves:
    """The metrics of metrics.jsonl, and as "validation/NAME" those of validation.jsonl.

    Raises:
        ValueError: there is no metrics.jsonl, or a line of either is damaged.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give a run's folder, which holds metrics.jsonl")
    series: dict[str, tuple[list[int], list[float]]] = {}
    for name, prefix in (("metrics.jsonl", ""), ("validation.jsonl", VALIDATION)):
        path = folder / name
        for number, record in read_records(path) if path.exists() or not prefix else ():
            if not isinstance(step := record.get("step"), int) or not 0 <= step < MAX_STEP:
                raise ValueError(f"{path}, line {number} has no whole number as its step")
            for key, value in record.items():
                if key != "step" and (value is None or isinstance(value, int | float)):
                    steps, values = series.setdefault(prefix + key, ([], []))
                    steps.append(step)
                    values.append(float(value) if value is not None and abs(value) < MAX_VALUE else math.nan)
    return Curves(folder.resolve().name if label is None else label, series)


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    """Each value's mean with its neighbours up to window // 2 on either side; values that are not finite are skipped.

    Returns:
        float64, as long as `values`; NaN where no neighbour is finite.
    """
    is_finite, half = np.isfinite(values), window // 2
    parts = (np.where(is_finite, values, 0.0), is_finite)
    sums, counts = (np.convolve(part, np.ones(2 * half + 1))[half : half + len(values)] for part in parts)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def draw(runs: Sequence[Curves], path: Path) -> None:
    """Write the PNG, whole or not at all."""
    panels = [panel for panel in _PANELS if any(_drawable(run, name) for run in runs for name in panel.lines)]
    count = max(len(panels), 1)
    figure, grid = pictures.make_panels(count, _COLUMNS, (4.3 * _COLUMNS, 2.7 * -(-count // _COLUMNS) + 0.7))
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, panel, runs)
    if len(runs) == 1:
        pictures.figure_title(figure, runs[0].label)
    else:
        handles = [pictures.legend_line(color=_colour(number), linewidth=2.5) for number in range(len(runs))]
        labels = [pictures.literal(run.label) for run in runs]
        figure.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False, fontsize=10)
    pictures.save(figure, path)


def _colour(number: int) -> str:
    return pictures.COLOURS[number % len(pictures.COLOURS)]


def _drawable(run: Curves, name: str) -> bool:
    values = run.series.get(name, ((), ()))[1]
    scope, _, kind = name.partition("/")
    if kind in ("mean", "reward") and values == run.series.get(f"{scope}/strict", ((), ()))[1]:
        return False  # the reward is the strict verifier: the same line again
    return any(math.isfinite(value) and (value != 0 or name != "reward/penalty") for value in values)


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[Curves]) -> None:
    """Several runs differ in colour and their metrics in line style; the metrics of one run differ in colour."""
    lines = [(name, label) for name, label in panel.lines.items() if any(_drawable(run, name) for run in runs)]
    if len(lines) > 2 and lines[-1][1] == "all":
        lines.pop()  # the mean over kinds of turn is left out where the kinds are shown
    is_one_run = len(runs) == 1
    styles = [{"color": _colour(k)} if is_one_run else {"linestyle": _STYLES[k % len(_STYLES)]} for k in range(len(lines))]
    drawn: list[float] = []
    for run_number, run in enumerate(runs):
        for number, (name, _) in enumerate(lines):
            if _drawable(run, name):
                steps, values = run.series[name]
                style = {"color": _colour(run_number), "zorder": 3 - 0.1 * number} | styles[number]
                _draw_line(axes, steps, values, name.startswith(VALIDATION), style)
                drawn += [value for value in values if math.isfinite(value)]
    _set_scale(axes, panel, drawn)
    if len(lines) > 1:
        common = {"color": pictures.SOFT, "linewidth": 2 if is_one_run else 1.8}
        handles = [pictures.legend_line(**common | style) for style in styles]
        axes.legend(handles, [label for _, label in lines], framealpha=0.85, edgecolor="none", fontsize=7.5, loc="best")


def _draw_line(axes: Axes, steps: list[int], values: list[float], is_sparse: bool, style: dict[str, Any]) -> None:
    window = len(values) // 12
    if is_sparse or window < 2:
        axes.plot(steps, values, linewidth=1.6, marker="o", markersize=3, **style)
        return
    axes.plot(steps, values, **(style | {"linestyle": "-", "linewidth": 0.7, "alpha": 0.3}))
    axes.plot(steps, smooth(values, window), linewidth=2, **style)


def _set_scale(axes: Axes, panel: Panel, drawn: list[float]) -> None:
    positive = [value for value in drawn if value > 0]
    if panel.scale == "share":
        axes.set_ylim(-0.02, 1.02)
    elif panel.scale == "log" and positive and max(positive) > LOG_SPAN * min(positive):
        axes.set_yscale("log", nonpositive="mask")
    elif drawn and min(drawn) >= 0:
        axes.set_ylim(0, 1.08 * max(drawn) or 1)
    axes.locator_params(axis="x", integer=True)
    pictures.panel_title(axes, panel.title)
    pictures.axis_labels(axes, x="step")
    pictures.clean_frame(axes, "y")
