"""Open a run's folder, save and load its checkpoints, and write its logs.

    config.yaml       the resolved settings; training takes it as a --config
    inputs.json       fingerprints of the model, the prompts, the data and the reward function; see memrl/training/inputs.py
    metrics.jsonl     one object per step; a resumed run writes the same bytes as an uninterrupted one
    timing.jsonl      seconds of each step's parts, in a file of their own because they differ between runs
    validation.jsonl  one object per validation
    rollouts.jsonl    sample trajectories
    checkpoints/step-N/   DeepSpeed's state after N steps, model/, the policy as a Hugging Face folder, and their SHA256SUMS
    checkpoints/damaged-step-N/   one that was not whole when the run was resumed, for the user to look at or to delete
    start/            the reference model, if the run made it (the miniature's warm start)
    model/            the last checkpoint's model/
    best/             the policy with the best validation score, a Hugging Face folder with best.json
    curves.png        learning curves; tensorboard/, wandb/ and wandb_id.txt if those are used
    report.json       accuracy by document length, with report.png (miniature only)

All random numbers depend on (seed, step, ...) only, so a checkpoint needs no more than DeepSpeed's state and the step.

All ranks write a checkpoint under a temporary name; rank 0 flushes it to the disk and renames it, and from then on it is valid.
It contains its model/, so the two always match. The run's own model/ is replaced after that; if the run is killed in between,
the next start replaces it.

A resumed run verifies the checksums before it loads anything, and goes back to the newest checkpoint that is whole.
"""

import fcntl
import json
import math
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import yaml

from memrl.config import TrainConfig, ValidationOptions
from memrl.engine import distributed
from memrl.engine.checkpoint_check import damage_of, read_state, superfluous
from memrl.engine.deepspeed_engine import Engine
from memrl.engine.reshard import load_resharded
from memrl.training.same_run import LOCK, LOGS, check_place, check_same_run, disagreement, unseen
from memrl.utils.atomic_dirs import aside, finish_swap, publish, remove, swap_in
from memrl.utils.bounded_files import read_json
from memrl.utils.checksums import SUMS, hash_all, write_sums
from memrl.utils.command_line import warn
from memrl.utils.files import fingerprint, free_name, sync_path, sync_tree, write_whole
from memrl.utils.journal import Journal
from memrl.utils.plain_text import printable


class SaveError(RuntimeError):
    """A part of the run could not be written; every rank raises it, and earlier checkpoints are intact."""


class RunFolder:
    def __init__(self, path: str | Path):
        if not str(path).strip():
            raise ValueError("run_dir is empty (from an unset variable?); give a folder for the run")
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._lock_file: TextIO | None = None
        self._validation: dict = {}

    def open(self, config: TrainConfig, inputs: dict[str, str]) -> int:
        """Create the folder or resume its run; returns the number of steps done. Collective over ranks.

        A folder without steps and without start/ may be reused with new settings. `inputs` are fingerprints of the run's input
        files, by name.

        Raises:
            ValueError: another process trains here; the folder is not a run's, or holds a run of other settings or inputs, or any
                run while `resume` is "no"; no checkpoint is whole; the ranks do not share the folder, or differ in settings or
                inputs.
        """
        mine = config.to_dict() | {"inputs": inputs}
        # Rank 0 decides for all: ranks may see different states of a network disk.
        steps, mark, theirs = distributed.done_by_rank_0(lambda: (*self._enter(config, mine), mine))
        problem = disagreement(theirs, mine) or unseen(self.path / LOCK, mark)
        if problems := distributed.gather_lists([problem] if problem else []):
            raise ValueError(problems[0])
        step, damaged = self._newest_whole(steps)
        if step > config.rl.steps:
            raise ValueError(f"{self.path} has done {step} steps already, and rl.steps is {config.rl.steps}; raise rl.steps")
        distributed.done_by_rank_0(lambda: self._begin(config, inputs, step, damaged))
        return step

    def _enter(self, config: TrainConfig, settings: dict) -> tuple[list[int], str]:
        """Check and lock the folder; the steps with a checkpoint, and a mark that the other ranks must see in the lock."""
        check_place(self.path, config)
        self.path.mkdir(parents=True, exist_ok=True)
        mark = uuid.uuid4().hex
        self._lock(mark)
        if self._has_begun():
            if config.resume == "no":
                raise ValueError(f"{self.path} already holds a run; choose another run_dir, delete it, or use --resume auto")
            check_same_run(self.path, settings)
        if config.checkpoint.every and not self._steps() and (self.path / "model").exists():
            raise ValueError(
                f"{self.path} holds model/ but no checkpoint, so training would begin anew and replace it; choose another "
                "run_dir, or move model/ away"
            )
        return self._steps(), mark

    def _has_begun(self) -> bool:
        """Whether there is more than settings and a validation of the start: then neither settings nor inputs may change."""
        if self._steps() or any((self.path / name).exists() for name in ("metrics.jsonl", "start", "model")):
            return True
        return (self.path / "best").exists() and (self._best() or {}).get("step") != 0

    def _newest_whole(self, steps: Sequence[int]) -> tuple[int, dict[int, str]]:
        """The newest step with a whole checkpoint, 0 without checkpoints, and what is wrong with newer ones. Collective."""
        damaged: dict[int, str] = {}
        for step in reversed(steps):
            problem = damage_of(self.checkpoints / f"step-{step}", step)
            if problem is None:
                return step, damaged
            damaged[step] = problem
        if damaged:
            listed = "; ".join(f"step-{step}: {problem}" for step, problem in damaged.items())
            raise ValueError(
                f"no checkpoint in {self.checkpoints} is whole ({printable(listed, 400)}); nothing was changed; copy one back, "
                "or choose another run_dir"
            )
        return 0, damaged

    def _begin(self, config: TrainConfig, inputs: dict[str, str], step: int, damaged: dict[int, str]) -> None:
        """Repair what a kill or damage left behind, and write the settings down."""
        self.checkpoints.mkdir(exist_ok=True)
        for number, problem in damaged.items():
            spare = free_name(self.checkpoints / f"damaged-step-{number}")
            (self.checkpoints / f"step-{number}").rename(spare)
            problem = printable(problem, 400)
            warn(
                f"the checkpoint after step {number} is damaged ({problem}): it is now {spare}, the run goes back to step {step}"
            )
        for leftover in self.checkpoints.glob("tmp-*"):
            if re.fullmatch(r"tmp-(old-)?[0-9]+", leftover.name):
                remove(leftover)
        for name in ("model", "best"):
            finish_swap(self.path / name)
        if (self.path / "best").exists() and self._best() is None:
            spare = free_name(self.path / "damaged-best")
            (self.path / "best").rename(spare)
            warn(f"best/best.json is missing or damaged; the folder is now {spare}")
        if not self._has_begun():
            remove(self.path / "best")  # of earlier settings that never did a step
        self._validation = _validation_settings(config.validation)
        if step:
            self._publish(step)
        write_whole(self.path / "inputs.json", json.dumps(inputs) + "\n")
        write_whole(self.path / "config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False))
        for folder in (self.path, self.path.resolve().parent):
            sync_path(folder)

    def _lock(self, mark: str) -> None:
        # Never released here: the system releases it when the process ends, also after a kill.
        self._lock_file = open(self.path / LOCK, "a")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is training in {self.path}; wait for it, or choose another run_dir") from None
        self._lock_file.truncate(0)
        self._lock_file.write(mark)
        self._lock_file.flush()

    def _steps(self) -> list[int]:
        # Not by glob, which finds nothing in a folder that cannot be read: the run would begin anew.
        names = os.listdir(self.checkpoints) if self.checkpoints.exists() else []
        found = (re.fullmatch(r"step-([1-9][0-9]{0,17})", name) for name in names)
        return sorted(int(match[1]) for match in found if match)

    def save(
        self,
        engine: Engine,
        step: int,
        keep_last: int,
        export: Callable[[Path], None] | None = None,
        keep: int | None = None,
    ) -> None:
        """Write the checkpoint after `step` steps under a temporary name and rename it; raises SaveError. Collective over ranks.

        Args:
            keep_last: number of checkpoints that stay.
            export: called on rank 0, writes a Hugging Face folder of the weights: the checkpoint's and the run's model/.
            keep: the newest checkpoint at or before this step stays too.
        """
        temporary = self.checkpoints / f"tmp-{step}"
        what = f"the checkpoint after step {step}"
        self._on_rank_0(what, temporary, temporary.mkdir)  # `open` deleted what a killed run left there
        sums: dict[str, str] = {}

        def write() -> None:
            files = engine.save(temporary)
            sums.update(zip((str(file.relative_to(temporary)) for file in files), hash_all(files), strict=True))

        self._together(what, temporary, write)
        all_sums = dict(distributed.gather_lists(list(sums.items())))
        self._on_rank_0(what, temporary, lambda: self._complete(temporary, step, all_sums, export))
        self._on_rank_0(what, temporary, lambda: self._delete(superfluous(self._steps(), keep_last, keep)))

    def _complete(self, temporary: Path, step: int, sums: dict[str, str], export: Callable[[Path], None] | None) -> None:
        if export is not None:
            export(temporary / "model")
        state = {"step": step, "world_size": distributed.world_size(), "checksums": SUMS}
        (temporary / "state.json").write_text(json.dumps(state))
        write_sums(temporary, sums)
        # The logs must be on the disk before the checkpoint: a resumed run does not write these steps again.
        for log in self._logs():
            sync_path(log)
        sync_path(self.path)
        sync_tree(temporary)
        temporary.rename(self.checkpoints / f"step-{step}")
        sync_path(self.checkpoints)
        self._publish(step)

    def _delete(self, steps: Sequence[int]) -> None:
        for old in steps:
            # Renamed first, so that a half-deleted checkpoint is never taken for a whole one.
            doomed = self.checkpoints / f"tmp-old-{old}"
            (self.checkpoints / f"step-{old}").rename(doomed)
            remove(doomed)

    def write_model(self, export: Callable[[Path], None]) -> None:
        """Write model/ of a run without checkpoints; raises SaveError. Collective over ranks."""
        model = self.path / "model"
        self._on_rank_0("model/", aside(model, "new"), lambda: export(model))

    def _publish(self, step: int) -> None:
        model = self.checkpoints / f"step-{step}" / "model"
        if model.is_dir():
            publish(model, self.path / "model")

    def keep_best(self, step: int, score: float, export: Callable[[Path], None]) -> bool:
        """Replace best/ by the policy after `step` steps if its validation score is higher. Collective over ranks.

        A resumed run that repeats steps gets the same weights and scores, so best/ may already be from a later step. Scores of
        other validation settings, or of a validation file with other content, are not compared.

        Returns:
            Whether best/ was replaced; the same on all ranks. SaveError leaves the old best/ intact.
        """
        better = distributed.from_rank_0(score > self._best_score())
        if better:
            fresh = aside(self.path / "best", "new")
            self._on_rank_0("best/", fresh, lambda: self._write_best(fresh, step, score, export))
        return better

    def _write_best(self, fresh: Path, step: int, score: float, export: Callable[[Path], None]) -> None:
        remove(fresh)
        export(fresh)
        record = {"step": step, "score": score, "validation": self._validation}
        (fresh / "best.json").write_text(json.dumps(record) + "\n")
        sync_tree(fresh)
        swap_in(fresh, self.path / "best")

    def _best(self) -> dict[str, Any] | None:
        """What best.json says; None if it is missing or damaged."""
        try:
            best = read_json(self.path / "best" / "best.json")
            is_whole = type(best["step"]) is int and math.isfinite(best["score"]) and isinstance(best["validation"], dict)
        except (ValueError, KeyError, TypeError, OverflowError):
            return None
        return best if is_whole else None

    def _best_score(self) -> float:
        best = self._best()
        return best["score"] if best and best["validation"] == self._validation else -math.inf

    def _on_rank_0(self, what: str, unfinished: Path, work: Callable[[], None]) -> None:
        self._together(what, unfinished, work if distributed.rank() == 0 else lambda: None)

    def _together(self, what: str, unfinished: Path, work: Callable[[], None]) -> None:
        """Run `work` on every rank; if it fails on one, delete `unfinished` and raise SaveError on all."""
        problem = None
        try:
            work()
        except Exception as error:  # a full disk raises OSError, torch's RuntimeError or safetensors' own error
            reason = " ".join(str(error).split()) or type(error).__name__
            if not isinstance(error, ValueError):
                reason += f"; {shutil.disk_usage(self.path).free / 2**30:.1f} GiB are free on the disk of {self.path}"
            problem = f"rank {distributed.rank()}: {reason}"
        problems = distributed.gather_lists([problem] if problem else [])
        if problems:
            if distributed.rank() == 0:
                remove(unfinished)
            raise SaveError(
                f"{what} could not be written ({problems[0]}); earlier checkpoints and model/ are intact, and the same command "
                "resumes from the last one"
            )

    def load(self, engine: Engine, step: int) -> None:
        """Restore the engine's state after `step` steps, also on another number of ranks; collective over ranks.

        Raises ValueError if the checkpoint is damaged.
        """
        folder = self.checkpoints / f"step-{step}"
        try:
            ranks = read_state(folder, step)["world_size"]
            if ranks == distributed.world_size():
                engine.load(folder)
            else:
                carried = load_resharded(engine, folder)
                if distributed.rank() == 0:
                    print(f"{folder} was saved by {ranks} ranks, this run has {distributed.world_size()}: {carried}", flush=True)
        except Exception as error:  # DeepSpeed and torch raise many kinds for a damaged file
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            message = f"the checkpoint {folder} cannot be read ({reason}); move that folder away to resume from an earlier one"
            if distributed.rank():  # rank 0 prints only its own error, and its files may be intact
                print(f"error: rank {distributed.rank()}: {message}", file=sys.stderr, flush=True)
            raise ValueError(message) from error

    def truncate_logs(self, step: int) -> None:
        """Drop what a killed run logged after its last checkpoint, a torn last line included."""
        for path in self._logs():
            with Journal(path) as journal:
                if spare := journal.keep(lambda record: _step_of(record) <= step):
                    warn(f"{path.name} had damaged lines, which were dropped; the file as it was is {spare}")

    def _logs(self) -> list[Path]:
        return [path for name in LOGS if (path := self.path / name).exists()]

    def log(self, name: str, record: dict) -> None:
        """Append a line; JSON has no infinity and no NaN: such numbers become null."""
        with Journal(self.path / name) as journal:
            journal.append(_finite(record))


def _step_of(record: dict[str, Any]) -> int:
    if type(record["step"]) is not int:
        raise TypeError("step is not a number")
    return record["step"]


def _validation_settings(options: ValidationOptions) -> dict:
    """The settings that validation scores depend on; a file counts by its content."""
    settings = asdict(options) | {"every": None}
    if options.path is not None and Path(options.path).is_file():
        settings["path"] = fingerprint([options.path])
    return settings


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
