"""Whether a checkpoint's folder is as it was written, and which checkpoints a run keeps; see memrl/training/checkpoint.py."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memrl.engine import distributed
from memrl.utils.bounded_files import read_json
from memrl.utils.checksums import SUMS, damaged_files, read_sums
from memrl.utils.command_line import warn


def damage_of(folder: Path, step: int) -> str | None:
    """What is wrong with the checkpoint after `step` steps, if anything; each rank reads a part of its files. Collective."""
    problem, sums = distributed.from_rank_0(_read_sums(folder, step) if distributed.rank() == 0 else (None, {}))
    if problem is not None:
        return problem
    mine = sorted(sums)[distributed.rank() :: distributed.world_size()]
    problems = distributed.gather_lists(damaged_files(folder, {name: sums[name] for name in mine}))
    return problems[0] if problems else None


def read_state(folder: Path, step: int) -> dict[str, Any]:
    """state.json of the checkpoint after `step` steps; ValueError if it is damaged."""
    state = read_json(folder / "state.json")
    if not isinstance(state, dict) or state.get("step") != step or type(state.get("world_size")) is not int:
        raise ValueError(f"{folder / 'state.json'} is damaged")
    return state


def _read_sums(folder: Path, step: int) -> tuple[str | None, dict[str, str]]:
    """What is wrong with a checkpoint at first sight, if anything, and the checksums of its files."""
    try:
        if "checksums" in read_state(folder, step) or os.path.lexists(folder / SUMS):
            return None, read_sums(folder)
    except ValueError as error:
        return str(error), {}
    warn(f"{folder} is from an earlier version and has no checksums, so damage in it would not be noticed")
    return None, {}


def superfluous(steps: Sequence[int], keep_last: int, keep: int | None = None) -> list[int]:
    """The steps, of those in rising order, whose checkpoints are not kept: not the last ones, nor the newest up to `keep`.

    >>> superfluous([2, 4, 6, 8, 10], keep_last=2, keep=5)
    [2, 6]
    """
    kept = {*steps[-keep_last:], *[step for step in steps if keep is not None and step <= keep][-1:]}
    return [step for step in steps if step not in kept]
