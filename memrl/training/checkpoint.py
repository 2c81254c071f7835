"""Open a run's folder, save and load its checkpoints, and write its logs.

    config.yaml       the resolved settings; training takes it as a --config
    inputs.json       fingerprints of the prompts, the data and the reward function
    metrics.jsonl     one object per step; a resumed run writes the same bytes as an uninterrupted one
    timing.jsonl      seconds of each step's parts, in a file of their own because they differ between runs
    validation.jsonl  one object per validation
    rollouts.jsonl    sample trajectories
    checkpoints/step-N/   DeepSpeed's state after N steps, and model/, the policy as a Hugging Face folder
    start/            the reference model, if the run made it (the miniature's warm start)
    model/            the last checkpoint's model/
    best/             the policy with the best validation score, a Hugging Face folder with best.json
    curves.png        learning curves; tensorboard/, wandb/ and wandb_id.txt if those are used
    report.json       accuracy by document length, with report.png (miniature only)

All random numbers depend on (seed, step, ...) only, so a checkpoint needs no more than DeepSpeed's state and the step.

All ranks write a checkpoint under a temporary name; rank 0 flushes it to the disk and renames it, and from then on it is valid.
It contains its model/, so the two always match. The run's own model/ is replaced after that; if the run is killed in between,
the next start replaces it.
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

from memrl.config import TrainConfig, ValidationOptions
from memrl.engine import distributed
from memrl.engine.deepspeed_engine import Engine
from memrl.engine.reshard import load_resharded
from memrl.training.same_run import check_same_run, disagreement, unseen
from memrl.utils.atomic_dirs import aside, finish_swap, publish, swap_in
from memrl.utils.files import fingerprint, sync_path, sync_tree, write_whole
from memrl.utils.journal import Journal

LOCK = ".lock"
LOGS = ("metrics.jsonl", "timing.jsonl", "validation.jsonl", "rollouts.jsonl")


class SaveError(RuntimeError):
    """A part of the run could not be written; every rank raises it, and earlier checkpoints are intact."""


class RunFolder:
    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._lock_file: TextIO | None = None
        self._validation: dict = {}

    def open(self, config: TrainConfig, inputs: dict[str, str]) -> int:
        """Create the folder or resume its run; returns the number of steps done. Collective over ranks.

        A folder without steps and without start/ may be reused with new settings. `inputs` are fingerprints of the run's input
        files, by name.

        Raises:
            ValueError: another process trains here; the folder holds a run of other settings or inputs, or any run while `resume`
                is "no"; its last checkpoint cannot be resumed; the ranks do not share the folder, or differ in settings or
                inputs.
        """
        problem, step, mark = None, 0, uuid.uuid4().hex
        mine = config.to_dict() | {"inputs": inputs}
        if distributed.rank() == 0:
            try:
                step = self._open(config, mine, mark)
            except (ValueError, OSError) as error:
                problem = str(error)
        # Rank 0 decides for all: ranks may see different states of a network disk.
        problem, step, mark, theirs = distributed.from_rank_0((problem, step, mark, mine))
        if problem is not None:
            raise ValueError(problem)
        problem = disagreement(theirs, mine) or unseen(self.path / LOCK, mark)
        if problems := distributed.gather_lists([problem] if problem else []):
            raise ValueError(problems[0])
        return step

    def _open(self, config: TrainConfig, settings: dict, mark: str) -> int:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock(mark)
        for leftover in self.checkpoints.glob("tmp-*"):
            shutil.rmtree(leftover)
        for name in ("model", "best"):
            finish_swap(self.path / name)
        self._validation = _validation_settings(config.validation)
        steps = self._steps()
        if steps or (self.path / "metrics.jsonl").exists() or (self.path / "start").exists():
            if config.resume == "no":
                raise ValueError(f"{self.path} already holds a run; choose another run_dir, delete it, or use --resume auto")
            check_same_run(self.path, settings)
        else:
            shutil.rmtree(self.path / "best", ignore_errors=True)  # of earlier settings that never did a step
        if steps:
            self._check_checkpoint(self.checkpoints / f"step-{steps[-1]}", config.rl.steps)
            self._publish(steps[-1])
        write_whole(self.path / "inputs.json", json.dumps(settings["inputs"]) + "\n")
        write_whole(self.path / "config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False))
        for folder in (self.path, self.path.resolve().parent):
            sync_path(folder)
        return steps[-1] if steps else 0

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

    def _check_checkpoint(self, folder: Path, total_steps: int) -> None:
        try:
            saved = json.loads((folder / "state.json").read_text())
            step, _ = saved["step"], saved["world_size"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(f"the checkpoint {folder} is damaged; delete that folder to resume from an earlier one") from None
        if step > total_steps:
            raise ValueError(f"{self.path} has done {step} steps already, and rl.steps is {total_steps}; raise rl.steps")

    def _steps(self) -> list[int]:
        found = (re.fullmatch(r"step-(\d+)", p.name) for p in self.checkpoints.glob("step-*"))
        return sorted(int(match[1]) for match in found if match)

    def save(
        self, engine: Engine, step: int, keep_last: int, export: Callable[[Path], None] | None = None, keep: int | None = None
    ) -> None:
        """Write the checkpoint after `step` steps under a temporary name and rename it; raises SaveError. Collective over ranks.

        `export`, called on rank 0, writes a Hugging Face folder of the weights: the checkpoint's and the run's model/. `keep` is
        the step of an older checkpoint that is not deleted.
        """
        temporary = self.checkpoints / f"tmp-{step}"
        what = f"the checkpoint after step {step}"
        self._on_rank_0(what, temporary, temporary.mkdir)  # `open` deleted what a killed run left there
        self._together(what, temporary, lambda: engine.save(temporary))
        self._on_rank_0(what, temporary, lambda: self._complete(temporary, step, keep_last, export, keep))

    def _complete(
        self, temporary: Path, step: int, keep_last: int, export: Callable[[Path], None] | None, keep: int | None
    ) -> None:
        if export is not None:
            export(temporary / "model")
        state = {"step": step, "world_size": distributed.world_size()}
        (temporary / "state.json").write_text(json.dumps(state))
        # The logs must be on the disk before the checkpoint: a resumed run does not write these steps again.
        for log in self._logs():
            sync_path(log)
        sync_path(self.path)
        sync_tree(temporary)
        temporary.rename(self.checkpoints / f"step-{step}")
        sync_path(self.checkpoints)
        self._publish(step)
        for old in [old for old in self._steps()[:-keep_last] if old != keep]:
            # Renamed first, so that a half-deleted checkpoint is never taken for a whole one.
            doomed = self.checkpoints / f"tmp-old-{old}"
            (self.checkpoints / f"step-{old}").rename(doomed)
            shutil.rmtree(doomed)

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
        shutil.rmtree(fresh, ignore_errors=True)
        export(fresh)
        record = {"step": step, "score": score, "validation": self._validation}
        (fresh / "best.json").write_text(json.dumps(record) + "\n")
        sync_tree(fresh)
        swap_in(fresh, self.path / "best")

    def _best_score(self) -> float:
        try:
            best = json.loads((self.path / "best" / "best.json").read_text())
            return best["score"] if best["validation"] == self._validation else -math.inf
        except (OSError, ValueError, KeyError, TypeError):
            return -math.inf

    def _on_rank_0(self, what: str, unfinished: Path, work: Callable[[], None]) -> None:
        self._together(what, unfinished, work if distributed.rank() == 0 else lambda: None)

    def _together(self, what: str, unfinished: Path, work: Callable[[], None]) -> None:
        """Run `work` on every rank; if it fails on one, delete `unfinished` and raise SaveError on all."""
        problem = None
        try:
            work()
        except Exception as error:  # a full disk raises OSError, torch's RuntimeError or safetensors' own error
            problem = f"rank {distributed.rank()}: {' '.join(str(error).split()) or type(error).__name__}"
        problems = distributed.gather_lists([problem] if problem else [])
        if problems:
            if distributed.rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            free = shutil.disk_usage(self.path).free / 2**30
            raise SaveError(
                f"{what} could not be written ({problems[0]}; {free:.1f} GiB are free on the disk of {self.path}); earlier "
                "checkpoints are intact, and the same command resumes from the last one"
            )

    def load(self, engine: Engine, step: int) -> None:
        """Restore the engine's state after `step` steps, also on another number of ranks; collective over ranks.

        Raises ValueError if the checkpoint is damaged.
        """
        folder = self.checkpoints / f"step-{step}"
        try:
            ranks = json.loads((folder / "state.json").read_text())["world_size"]
            if ranks == distributed.world_size():
                engine.load(folder)
            else:
                carried = load_resharded(engine, folder)
                if distributed.rank() == 0:
                    print(f"{folder} was saved by {ranks} ranks, this run has {distributed.world_size()}: {carried}", flush=True)
        except Exception as error:  # DeepSpeed and torch raise many kinds for a damaged file
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            message = f"the checkpoint {folder} cannot be read ({reason}); delete that folder to resume from an earlier one"
            if distributed.rank():  # rank 0 prints only its own error, and its files may be intact
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
