"""A run's folder: what is in it, and how a checkpoint comes to be there whole or not at all.

    config.yaml       the resolved settings; train.py takes it as a --config
    inputs.json       fingerprints of the prompts and the data
    metrics.jsonl     one object a step; a resumed run writes the same bytes as an uninterrupted one
    timing.jsonl      seconds of each step's parts, kept apart because they never repeat
    rollouts.jsonl    sample trajectories
    checkpoints/step-N/   DeepSpeed's state after N steps, and model/, the policy as a Hugging Face folder
    start/            the frozen start, when this run made it (the miniature's warm start)
    model/            the last checkpoint's model/
    best/             the policy with the best validation score, a Hugging Face folder with best.json
    curves.png        learning curves; tensorboard/, wandb/ and wandb_id.txt where those are used
    report.json       report.png

All randomness of a run is a function of (seed, step, ...), so DeepSpeed's state and the step's number are all there is to save.

A checkpoint is written under another name, by all ranks; rank 0 flushes it to the disk and renames it, which is the moment from
which it counts. Its model/ is inside, so the two cannot disagree; the run's own model/ follows at once, and after a kill
between the two the next start makes up for it.
"""

import fcntl
import json
import math
import re
import shutil
import sys
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import yaml

from memrl.config import TrainConfig, flatten
from memrl.engine import distributed
from memrl.engine.deepspeed_engine import Engine
from memrl.engine.reshard import load_resharded
from memrl.training.atomic_dirs import aside, finish_swap, make_empty, publish, swap_in
from memrl.training.same_run import changes, disagreement, sees, unseen
from memrl.utils.files import fingerprint, sync_path, sync_tree, write_whole
from memrl.utils.journal import Journal

LOCK = ".lock"
LOGS = ("metrics.jsonl", "timing.jsonl", "validation.jsonl", "rollouts.jsonl")


class SaveError(RuntimeError):
    """Something of a run could not be written; every rank raises it, and what was saved before is whole."""


class RunFolder:
    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._lock_file: TextIO | None = None
        self._validation: dict = {}

    def open(self, config: TrainConfig, inputs: dict[str, str]) -> int:
        """Make the folder or take it up again; returns the number of steps done. Collective over ranks.

        Settings that came to nothing (no step done, no start made) bind nobody.

        Args:
            inputs: fingerprints of what the run reads besides its settings, by name; see `fingerprint`.

        Raises:
            ValueError: another process trains here; the folder holds a run of other settings or inputs, or any run while `resume`
                is "no"; its last checkpoint cannot be resumed; the ranks do not share the folder, or differ in settings or
                inputs.
        """
        problem, step, mark, mine = None, 0, uuid.uuid4().hex, config.to_dict() | {"inputs": inputs}
        if distributed.rank() == 0:
            try:
                step = self._open(config, inputs, mark)
            except (ValueError, OSError) as error:
                problem = str(error)
        # One rank looks and all hear the same, also where the disk is not quite the same for all.
        problem, step, mark, theirs = distributed.from_rank_0((problem, step, mark, mine))
        if problem is not None:
            raise ValueError(problem)
        problem = disagreement(theirs, mine) or (None if sees(self.path / LOCK, mark) else unseen(self.path))
        if problems := distributed.gather_lists([problem] if problem else []):
            raise ValueError(problems[0])
        return step

    def _open(self, config: TrainConfig, inputs: dict[str, str], mark: str) -> int:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock(mark)
        for leftover in self.checkpoints.glob("tmp-*"):
            shutil.rmtree(leftover)
        for name in ("model", "best"):
            finish_swap(self.path / name)
        self._validation = _validation_settings(config)
        steps = self._steps()
        if steps or (self.path / "metrics.jsonl").exists() or (self.path / "start").exists():
            if config.resume == "no":
                raise ValueError(f"{self.path} already holds a run; choose another run_dir, delete it, or use --resume auto")
            self._check_same_run(config.to_dict() | {"inputs": inputs})
        else:
            shutil.rmtree(self.path / "best", ignore_errors=True)  # of settings that came to nothing
        if steps:
            self._check_checkpoint(self.checkpoints / f"step-{steps[-1]}", config.rl.steps)
            self._publish(steps[-1])
        write_whole(self.path / "inputs.json", json.dumps(inputs) + "\n")
        write_whole(self.path / "config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False))
        for folder in (self.path, self.path.resolve().parent):
            sync_path(folder)
        return steps[-1] if steps else 0

    def _lock(self, mark: str) -> None:
        # Held, never released: the system does that when the process ends, however it ends.
        self._lock_file = open(self.path / LOCK, "a")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is training in {self.path}; wait for it, or choose another run_dir") from None
        self._lock_file.truncate(0)
        self._lock_file.write(mark)
        self._lock_file.flush()

    def _check_same_run(self, settings: dict) -> None:
        try:
            old = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
            old |= {"inputs": json.loads((self.path / "inputs.json").read_text(encoding="utf-8"))}
        except (OSError, ValueError, TypeError, yaml.YAMLError):
            raise ValueError(
                f"config.yaml or inputs.json in {self.path} is missing or damaged, so nobody can say whether this is the same "
                "run; choose another run_dir"
            ) from None
        if differ := changes(flatten(old), flatten(settings)):
            raise ValueError(
                f"{self.path} holds a run with other settings ({'; '.join(differ)}); give another run_dir, or the same settings"
            )

    def _check_checkpoint(self, folder: Path, total_steps: int) -> None:
        try:
            saved = json.loads((folder / "state.json").read_text())
            step, _ = saved["step"], saved["world_size"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(f"the checkpoint {folder} is damaged; delete that folder to resume from an earlier one") from None
        if step > total_steps:
            raise ValueError(f"{self.path} has done {step} steps already, and rl.steps is {total_steps}")

    def _steps(self) -> list[int]:
        found = (re.fullmatch(r"step-(\d+)", p.name) for p in self.checkpoints.glob("step-*"))
        return sorted(int(match[1]) for match in found if match)

    def save(self, engine: Engine, step: int, keep_last: int, export: Callable[[Path], None] | None = None) -> None:
        """Write the state after `step` steps aside and rename it into place; collective over ranks.

        Args:
            export: writes a Hugging Face folder of the weights to the path that it is given; called on rank 0 alone. The
                checkpoint carries the folder, and the run's model/ becomes it.

        Raises:
            SaveError: on every rank, where one of them could not write; the earlier checkpoints are whole.
        """
        temporary = self.checkpoints / f"tmp-{step}"
        what = f"the checkpoint after step {step}"
        self._together(what, temporary, self._only_rank_0(lambda: make_empty(temporary)))
        self._together(what, temporary, lambda: engine.save(temporary))
        self._together(what, temporary, self._only_rank_0(lambda: self._complete(temporary, step, export)))
        self._together(what, temporary, self._only_rank_0(lambda: self._tidy(step, keep_last)))

    def _complete(self, temporary: Path, step: int, export: Callable[[Path], None] | None) -> None:
        if export is not None:
            export(temporary / "model")
        state = {"step": step, "world_size": distributed.world_size()}
        (temporary / "state.json").write_text(json.dumps(state))
        # What was logged of these steps must not be less durable than the checkpoint that says that they were done.
        for log in self._logs():
            sync_path(log)
        sync_path(self.path)
        sync_tree(temporary)
        temporary.rename(self.checkpoints / f"step-{step}")
        sync_path(self.checkpoints)

    def _tidy(self, step: int, keep_last: int) -> None:
        self._publish(step)
        for old in self._steps()[:-keep_last]:
            # Renamed first: half a checkpoint must not go by a whole one's name.
            doomed = self.checkpoints / f"tmp-old-{old}"
            (self.checkpoints / f"step-{old}").rename(doomed)
            shutil.rmtree(doomed)

    def _publish(self, step: int) -> None:
        model = self.checkpoints / f"step-{step}" / "model"
        if model.is_dir():
            publish(model, self.path / "model")

    def keep_best(self, step: int, score: float, export: Callable[[Path], None]) -> bool:
        """Make best/ the policy after `step` steps if its validation score is above the one kept. Collective over ranks.

        A resumed run that does steps again validates the same weights with the same score, so what it finds in best/, be it
        from a step ahead of it, is what it would write. A score of other validation settings, or of a validation file with
        another content, does not count.

        Args:
            export: as for `save`.

        Returns:
            Whether it was kept; the same on all ranks.

        Raises:
            SaveError: as `save`; the old best/ is whole.
        """
        better = distributed.from_rank_0(score > self._best_score())
        if better:
            fresh = aside(self.path / "best", "new")
            self._together("best/", fresh, self._only_rank_0(lambda: self._write_best(fresh, step, score, export)))
        return better

    def _write_best(self, fresh: Path, step: int, score: float, export: Callable[[Path], None]) -> None:
        shutil.rmtree(fresh, ignore_errors=True)
        export(fresh)
        record = {"step": step, "score": score, "validation": self._validation}
        (fresh / "best.json").write_text(json.dumps(record) + "\n")
        swap_in(fresh, self.path / "best")

    def _best_score(self) -> float:
        try:
            best = json.loads((self.path / "best" / "best.json").read_text())
            return best["score"] if best["validation"] == self._validation else -math.inf
        except (OSError, ValueError, KeyError, TypeError):
            return -math.inf

    def _only_rank_0(self, work: Callable[[], None]) -> Callable[[], None]:
        return work if distributed.rank() == 0 else lambda: None

    def _together(self, what: str, unfinished: Path, work: Callable[[], None]) -> None:
        """Run `work` on every rank; where it fails on one, delete what is unfinished and raise SaveError on all."""
        problem = None
        try:
            work()
        except Exception as error:  # a full disk shows as OSError, torch's RuntimeError or safetensors' own
            reason = " ".join(str(error).split()) or type(error).__name__
            problem = f"rank {distributed.rank()}: {reason}"
        problems = distributed.gather_lists([problem] if problem else [])
        if problems:
            if distributed.rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            free = shutil.disk_usage(self.path).free / 2**30
            raise SaveError(
                f"{what} could not be written ({problems[0]}; {free:.1f} GiB are free now on the disk of {self.path}); what was "
                "saved before is whole, and the same command resumes from it"
            )

    def load(self, engine: Engine, step: int) -> None:
        """Put the engine back to where it was after `step` steps, be it on another number of ranks. Collective over ranks.

        Raises:
            ValueError: the checkpoint is damaged.
        """
        folder = self.checkpoints / f"step-{step}"
        try:
            ranks = json.loads((folder / "state.json").read_text())["world_size"]
            if ranks == distributed.world_size():
                engine.load(folder)
            else:
                carried = load_resharded(engine, folder)
                if distributed.rank() == 0:
                    print(f"{folder} is of {ranks} ranks, this run has {distributed.world_size()}: {carried}", flush=True)
        except Exception as error:  # DeepSpeed and torch raise many kinds for a damaged file; all mean the same to a user
            reason = str(error).strip().splitlines()
            message = (
                f"the checkpoint {folder} cannot be read ({reason[0] if reason else type(error).__name__}); delete that folder "
                "to resume from an earlier one"
            )
            if distributed.rank():  # the others' parts may be whole, and an error is printed by the first rank alone
                print(f"error: rank {distributed.rank()}: {message}", file=sys.stderr, flush=True)
            raise ValueError(message) from error

    def truncate_logs(self, step: int) -> None:
        """Drop what a killed run logged after its last checkpoint, a torn last line included."""
        for path in self._logs():
            with Journal(path) as journal:
                journal.keep(lambda record: record["step"] <= step)

    def _logs(self) -> list[Path]:
        return [path for name in LOGS if (path := self.path / name).exists()]

    def log(self, name: str, record: dict) -> None:
        """Append a line; JSON has no infinity and no NaN: such numbers become null."""
        with Journal(self.path / name) as journal:
            journal.append(_finite(record))


def _validation_settings(config: TrainConfig) -> dict:
    """What validation scores depend on: how often there is one does not matter, and of a file what is in it, not where it is."""
    settings = asdict(config.validation) | {"every": None}
    if settings["path"] is not None and Path(settings["path"]).is_file():
        settings["path"] = fingerprint([settings["path"]])
    return settings


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
