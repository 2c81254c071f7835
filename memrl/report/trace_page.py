"""A reading, or a training run's rollouts, as a web page: the memory after each chunk and what changed in it.

memrl infer book.txt -q "..." --model DIR --trace reading.html
memrl trace runs/tiny/rollouts.jsonl --out rollouts.html --step 40
"""

from collections.abc import Iterable
from pathlib import Path

from memrl.reading.reader import Reading
from memrl.report.rendering import changes, render
from memrl.report.rollout_page import LAST, read_rollouts, rollouts_page
from memrl.utils.files import write_whole
from memrl.utils.progress import format_seconds

__all__ = ["changes", "write_rollouts", "write_trace"]


def write_trace(path: str | Path, readings: Iterable[Reading]) -> None:
    """Write a page of readings, whole or not at all."""
    readings = list(readings)
    title = f"{len(readings)} reading{'s' * (len(readings) != 1)}"
    write_whole(path, render("trace.html.j2", title=title, readings=readings, format_seconds=format_seconds))


def write_rollouts(path: str | Path, rollouts: str | Path, step: int | None = None, last: int = LAST) -> int:
    """Write a page of the last trajectories of a rollouts.jsonl, whole or not at all; returns their number.

    Args:
        step: show only trajectories of this step.

    Raises:
        ValueError: see `memrl.report.rollout_page.read_rollouts`.
    """
    records = read_rollouts(rollouts, step, last)
    run = Path(rollouts).resolve().parent.name
    steps = sorted({record["step"] for record in records})
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    write_whole(path, rollouts_page(records, f"Rollouts of {run}, {span}"))
    return len(records)
