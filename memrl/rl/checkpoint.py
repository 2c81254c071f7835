"""A run's folder: what is in it, and how a checkpoint comes to be there whole or not at all.

    config.yaml       the resolved settings; train.py takes it as a --config
    inputs.json       fingerprints of the prompts and the data
    metrics.jsonl     one object a step; a resumed run writes the same bytes as an uninterrupted one
    timing.jsonl      seconds of each step's parts, kept apart because they never repeat
    rollouts.jsonl    sample trajectories
    checkpoints/step-N/   DeepSpeed's state after N steps
    start/            the frozen start, when this run made it (the miniature's warm start)
    model/            the policy as of the last checkpoint, a Hugging Face folder
    report.json       report.png

All randomness of a run is a function of (seed, step, ...), so DeepSpeed's state and the step's number are all there is to save.
"""

import fcntl
import json
import math
import re
import shutil
from pathlib import Path
from typing import TextIO

import yaml

from memrl.config import TrainConfig, flatten
from memrl.files import sync_path, sync_tree, write_whole
from memrl.rl import distributed
from memrl.rl.engine import Engine

# What may change when a run is taken up again without making it another run: where it is, how its work is cut, what it keeps.
FREE_KEYS = (
    "run_dir",
    "resume",
    "device",
    "threads",
    "checkpoint",
    "report",
    "model.checkpoint_layers",
    "rollout.max_rows",
    "rollout.max_step_tokens",
    "rollout.cache_gib",
    "rl.micro_batch_tokens",
    "engine.persistence_threshold",
)
LOGS = ("metrics.jsonl", "timing.jsonl", "rollouts.jsonl")


class RunFolder:
    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._lock_file: TextIO | None = None

    def open(self, config: TrainConfig, inputs: dict[str, str]) -> int:
        """Make the folder or take it up again; returns the number of steps done. Collective over ranks.

        Settings that came to nothing (no step done, no start made) bind nobody.

        Args:
            inputs: fingerprints of what the run reads besides its settings, by name; see `fingerprint`.

        Raises:
            ValueError: another process trains here; the folder holds a run of other settings or inputs, or any run while `resume`
                is "no"; its last checkpoint cannot be resumed.
        """
        problem, step = None, 0
        if distributed.rank() == 0:
            try:
                step = self._open(config, inputs)
            except (ValueError, OSError) as error:
                problem = str(error)
        # One rank looks and all hear the same, also where the disk is not quite the same for all.
        problem, step = distributed.from_rank_0((problem, step))
        if problem is not None:
            raise ValueError(problem)
        return step

    def _open(self, config: TrainConfig, inputs: dict[str, str]) -> int:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock()
        for leftover in self.checkpoints.glob("tmp-*"):
            shutil.rmtree(leftover)
        steps = self._steps()
        if steps or (self.path / "metrics.jsonl").exists() or (self.path / "start").exists():
            if config.resume == "no":
                raise ValueError(f"{self.path} already holds a run; choose another run_dir, delete it, or use --resume auto")
            self._check_same_run(config.to_dict() | {"inputs": inputs})
        if steps:
            self._check_checkpoint(self.checkpoints / f"step-{steps[-1]}", config.rl.steps)
        write_whole(self.path / "inputs.json", json.dumps(inputs) + "\n")
        write_whole(self.path / "config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False))
        return steps[-1] if steps else 0

    def _lock(self) -> None:
        # Held, never released: the system does that when the process ends, however it ends.
        self._lock_file = open(self.path / ".lock", "w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is training in {self.path}; wait for it, or choose another run_dir") from None

    def _check_same_run(self, settings: dict) -> None:
        try:
            old = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
            old |= {"inputs": json.loads((self.path / "inputs.json").read_text(encoding="utf-8"))}
        except (OSError, ValueError, TypeError, yaml.YAMLError):
            raise ValueError(
                f"config.yaml or inputs.json in {self.path} is missing or damaged, so nobody can say whether this is the same "
                "run; choose another run_dir"
            ) from None
        old_flat, new_flat = flatten(old), flatten(settings)
        free = tuple(f"{key}." for key in FREE_KEYS)
        if new_flat["optim.min_lr_ratio"] == 1:
            free += ("rl.steps.",)  # with a constant rate a longer run begins like the shorter one
        differ = [
            f"{key}: {old_flat.get(key)} -> {new_flat.get(key)}"
            for key in sorted(old_flat.keys() | new_flat.keys())
            if old_flat.get(key) != new_flat.get(key) and not f"{key}.".startswith(free)
        ]
        if differ:
            raise ValueError(
                f"{self.path} holds a run with other settings ({'; '.join(differ)}); give another run_dir, or the same settings"
            )

    def _check_checkpoint(self, folder: Path, total_steps: int) -> None:
        try:
            saved = json.loads((folder / "state.json").read_text())
            step, ranks = saved["step"], saved["world_size"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(f"the checkpoint {folder} is damaged; delete that folder to resume from an earlier one") from None
        if ranks != distributed.world_size():
            raise ValueError(
                f"{folder} was written by {ranks} ranks and this run has {distributed.world_size()}; resume with the same number "
                f"(torchrun --nproc_per_node {ranks})"
            )
        if step > total_steps:
            raise ValueError(f"{self.path} has done {step} steps already, and rl.steps is {total_steps}")

    def _steps(self) -> list[int]:
        found = (re.fullmatch(r"step-(\d+)", p.name) for p in self.checkpoints.glob("step-*"))
        return sorted(int(match[1]) for match in found if match)

    def save(self, engine: Engine, step: int, keep_last: int) -> None:
        """Write the state after `step` steps aside and rename it into place; collective over ranks."""
        temporary, final = self.checkpoints / f"tmp-{step}", self.checkpoints / f"step-{step}"
        engine.save(temporary)
        distributed.barrier()
        if distributed.rank() == 0:
            state = {"step": step, "world_size": distributed.world_size()}
            (temporary / "state.json").write_text(json.dumps(state))
            # What was logged of these steps must not be less durable than the checkpoint that says that they were done.
            for name in LOGS:
                if (self.path / name).exists():
                    sync_path(self.path / name)
            sync_tree(temporary)
            temporary.rename(final)
            sync_path(self.checkpoints)
            for old in self._steps()[:-keep_last]:
                # Renamed first: half a checkpoint must not go by a whole one's name.
                doomed = self.checkpoints / f"tmp-old-{old}"
                (self.checkpoints / f"step-{old}").rename(doomed)
                shutil.rmtree(doomed)
        distributed.barrier()

    def load(self, engine: Engine, step: int) -> None:
        """Put the engine back to where it was after `step` steps.

        Raises:
            ValueError: the checkpoint is damaged.
        """
        folder = self.checkpoints / f"step-{step}"
        try:
            engine.load(folder)
        except Exception as error:  # DeepSpeed and torch raise many kinds for a damaged file; all mean the same to a user
            reason = str(error).strip().splitlines()
            raise ValueError(
                f"the checkpoint {folder} cannot be read ({reason[0] if reason else type(error).__name__}); delete that folder "
                "to resume from an earlier one"
            ) from error

    def truncate_logs(self, step: int) -> None:
        """Drop what a killed run logged beyond its last checkpoint, a torn last line included."""
        for name in LOGS:
            path = self.path / name
            if path.exists():
                kept = [line for line in path.read_text().splitlines(keepends=True) if _logged_step(line) <= step]
                write_whole(path, "".join(kept))

    def log(self, name: str, record: dict) -> None:
        """Append a line; numbers that are not finite, for which JSON has no word, become null."""
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(record)) + "\n")


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _logged_step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")
