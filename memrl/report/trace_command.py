"""A reading, or a training run's rollouts, as a web page: the memory after each chunk and what changed in it.

python infer.py book.txt -q "..." --model DIR --trace reading.html
python -m memrl.report.trace_command runs/tiny/rollouts.jsonl --out rollouts.html --step 40
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from memrl.reading.reader import Reading
from memrl.report.rendering import changes, render
from memrl.report.rollout_page import LAST, read_rollouts, rollouts_page
from memrl.utils.command_line import fail, user_errors
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see {self.prog} --help)")


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def main(arguments: list[str] | None = None) -> int:
    parser = _Parser(prog="python -m memrl.report.trace_command", description="Sample rollouts of a training run as a web page.")
    parser.add_argument("rollouts", type=Path, metavar="ROLLOUTS", help="a run's rollouts.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="the HTML file to write")
    parser.add_argument("--step", type=_positive, help="only the trajectories of this step")
    parser.add_argument("--last", type=_positive, default=LAST, help=f"only the last so many trajectories (default: {LAST})")
    options = parser.parse_args(arguments)
    with user_errors():
        if options.rollouts.is_dir():
            raise ValueError(f"{options.rollouts} is a folder; give {options.rollouts / 'rollouts.jsonl'}")
        if options.out.resolve() == options.rollouts.resolve():
            raise ValueError(f"--out {options.out} is the file to be shown; choose another name")
        if not options.out.absolute().parent.is_dir():
            raise ValueError(f"--out {options.out}: there is no folder {options.out.parent}; make it first")
        count = write_rollouts(options.out, options.rollouts, options.step, options.last)
    print(f"{options.out}: {count} trajector{'y' if count == 1 else 'ies'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
