"""Tables and picture of benchmarks/agents.py: accuracy of each agent before and after RL, paired changes, and costs.

Intervals are those of benchmarks/ablation_table.py: 95% over documents, paired where two agents read the same ones, and beside
them the lowest and highest seed. Two agents differ in a cell only if the paired interval excludes 0 and all seeds have one sign.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.ablation_table import Estimate, accuracy
from memrl.evaluation.statistics import paired_interval
from memrl.utils import pictures

Figures = Mapping[str, Mapping]  # of one model: cell -> its figures, see benchmarks/agents_cells.py
Results = Mapping[int, Figures]  # by seed


class Stages(Protocol):
    before: Mapping[int, Figures]
    after: Mapping[int, Figures]


BETTER, WORSE = "▲", "▼"


def cell_accuracy(results: Results, cell: str) -> Estimate | None:
    rights = [figures[cell]["right"] for figures in results.values() if cell in figures]
    return accuracy([[bool(value) for value in right] for right in rights]) if rights else None


def paired_change(results: Results, base: Results, cell: str) -> Estimate | None:
    """Accuracy minus the base's on the same documents, over the seeds that both have; None if there are none."""
    gains, losses, n, shares = 0, 0, 0, []
    for seed in sorted(results.keys() & base.keys()):
        if cell not in results[seed] or cell not in base[seed]:
            continue
        pairs = list(zip(results[seed][cell]["right"], base[seed][cell]["right"], strict=True))
        better, worse = sum(mine > other for mine, other in pairs), sum(mine < other for mine, other in pairs)
        gains, losses, n = gains + better, losses + worse, n + len(pairs)
        shares.append((better - worse) / len(pairs))
    return Estimate((gains - losses) / n, *paired_interval(gains, losses, n), min(shares), max(shares)) if n else None


def differs(change: Estimate | None) -> str:
    """A mark if the interval excludes 0 and all seeds have that sign; "" if not."""
    if change is None:
        return ""
    if change.low > 0 and change.least > 0:
        return BETTER
    return WORSE if change.high < 0 and change.most < 0 else ""


def accuracy_table(
    after: Mapping[str, Results], before: Mapping[str, Results], fixed: Mapping[str, Results], cells: Sequence[str]
) -> str:
    """One line per agent, one column per cell: `before → after [95% interval of after]`; `fixed` are lines without a model."""
    rows = []
    for agent in {**before, **after, **fixed}:
        row = [agent]
        for cell in cells:
            old = cell_accuracy(before.get(agent, {}), cell)
            new = cell_accuracy(after.get(agent, fixed.get(agent, {})), cell)
            mark = differs(paired_change(after[agent], before[agent], cell)) if agent in after and old else ""
            arrow = f"{100 * old.mean:.0f} → " if old and new else ""
            row.append(f"{arrow}{accuracy_text(new or old, mark)}")
        rows.append(row)
    return markdown(["agent", *map(cell_name, cells)], rows)


def accuracy_text(value: Estimate | None, mark: str = "") -> str:
    return f"{100 * value.mean:.0f}{mark} [{100 * value.low:.0f}, {100 * value.high:.0f}]" if value else ""


def change_table(results: Mapping[str, Results], base: str, cells: Sequence[str]) -> tuple[str, int]:
    """Paired changes against the base, and the number of cells that differ."""
    agents = [agent for agent in results if agent != base]
    rows = [[agent, *(change_text(results[agent], results[base], cell) for cell in cells)] for agent in agents]
    count = sum(bool(differs(paired_change(results[agent], results[base], cell))) for agent in agents for cell in cells)
    return markdown(["agent", *map(cell_name, cells)], rows), count


def change_text(results: Results, base: Results, cell: str) -> str:
    """`mean [95% interval] (lowest to highest seed)` of the paired change, with a mark where the two differ."""
    change = paired_change(results, base, cell)
    if change is None:
        return ""
    mean, low, high, least, most = (
        f"{100 * part + 0.0:+.0f}" for part in (change.mean, change.low, change.high, change.least, change.most)
    )
    return f"{mean}{differs(change)} [{low}, {high}] ({least} to {most})"


def cost_table(after: Mapping[str, Results], cells: Sequence[str]) -> str:
    """Turns, tokens and CPU seconds of a document, for one length: means over the documents of all tasks and seeds."""
    rows = []
    for agent, results in after.items():
        found = [figures[cell] for figures in results.values() for cell in cells if cell in figures and "turns" in figures[cell]]
        if not found:
            continue
        documents = sum(len(figures["right"]) for figures in found)
        names = ("turns", "prompt_tokens", "response_tokens")
        means = [sum(math.fsum(figures[name]) for figures in found) / documents for name in names]
        seconds = math.fsum(figures["seconds"] for figures in found) / documents
        rows.append([agent, *(f"{mean:,.1f}" for mean in means), f"{seconds:.3f}"])
    return markdown(["agent", "turns", "prompt tokens", "response tokens", "seconds"], rows)


def read_share(results: Results, cell: str, chunks: int) -> list[float]:
    """By seed, the mean share of the document's chunks that were read."""
    return [
        math.fsum(figures[cell]["read"]) / len(figures[cell]["read"]) / chunks for figures in results.values() if cell in figures
    ]


def cell_name(cell: str) -> str:
    task, chunks = cell.split(":")
    return f"{task.replace('_', ' ')}, {chunks}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def plot_agents(path: Path, stages: Mapping[str, Stages], cells: Sequence[str], title: str) -> None:
    """A panel per cell: accuracy of each agent with its interval, its seeds, and what it had before RL."""
    height = 1.6 + -(-len(cells) // 3) * (0.8 + 0.26 * len(stages))
    figure, panels = pictures.make_panels(len(cells), 3, (13.0, height), sharey=True)
    for axes, cell in zip(panels, cells, strict=True):
        for place, found in enumerate(stages.values()):
            last, old = cell_accuracy(found.after or found.before, cell), cell_accuracy(found.before, cell)
            colour = pictures.COLOURS[place % len(pictures.COLOURS)]
            if last is not None:
                axes.plot([100 * last.low, 100 * last.high], [place, place], color=colour, linewidth=2.2, zorder=2)
                axes.plot(100 * last.mean, place, "o", color=colour, markersize=6.5, zorder=4, clip_on=False)
                seeds = [100 * last.least, 100 * last.most]
                axes.plot(seeds, [place + 0.27] * 2, "|", color=colour, markersize=6, clip_on=False)
            if old is not None and found.after:
                axes.plot(100 * old.mean, place, "x", color="#999999", markersize=6, zorder=3, clip_on=False)
        pictures.percent_axis(axes, "x")
        pictures.panel_title(axes, f"{cell_name(cell)} chunks")
        axes.set_yticks(range(len(stages)), [pictures.literal(agent) for agent in stages])
        axes.set_ylim(len(stages) - 0.4, -0.6)
    pictures.figure_title(figure, title)
    pictures.note(figure, "dot and bar: after RL, 95% interval over documents; |: lowest and highest seed; x: before RL")
    pictures.save(figure, path)
