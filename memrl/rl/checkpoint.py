"""A run's folder: what is in it, and how a checkpoint comes to be there whole or not at all.

    config.yaml       the resolved settings
    metrics.jsonl     one object a step; a resumed run writes the same bytes as an uninterrupted one
    timing.jsonl      seconds of each step's parts, kept apart because they never repeat
    rollouts.jsonl    sample trajectories
    checkpoints/step-N/   DeepSpeed's state after N steps
    start/            the frozen start, when this run made it (the miniature's warm start)
    model/            the trained policy, a Hugging Face folder
    report.json       report.png

All randomness of a run is a function of (seed, step, ...), so DeepSpeed's state and the step's number are all there is to save.
"""

import json
import os
import re
import shutil
from pathlib import Path

import yaml

from memrl.config import TrainConfig
from memrl.rl import distributed
from memrl.rl.engine import Engine

# What may change between the start of a run and its resumption without making it another run.
FREE_KEYS = ("run_dir", "resume", "threads", "checkpoint", "report")


class RunFolder:
    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"

    def open(self, config: TrainConfig) -> int:
        """Make the folder or take it up again; returns the number of steps done.

        Raises:
            ValueError: the folder holds a run of other settings, or any run while `resume` is "no".
        """
        config_path = self.path / "config.yaml"
        if config_path.exists():
            if config.resume == "no":
                raise ValueError(f"{self.path} already holds a run; choose another run_dir, delete it, or use --resume auto")
            self._check_same_run(yaml.safe_load(config_path.read_text()), config.to_dict())
        # Every rank must have looked before rank 0 writes what it looked for.
        distributed.barrier()
        if distributed.rank() == 0:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            write_atomically(config_path, yaml.safe_dump(config.to_dict(), sort_keys=False))
            for leftover in self.checkpoints.glob("tmp-*"):
                shutil.rmtree(leftover)
        distributed.barrier()
        return max(self._steps(), default=0)

    def _check_same_run(self, old: dict, new: dict) -> None:
        old_flat, new_flat = flatten(old), flatten(new)
        differ = [
            f"{key}: {old_flat.get(key)} -> {new_flat.get(key)}"
            for key in sorted(old_flat.keys() | new_flat.keys())
            if old_flat.get(key) != new_flat.get(key) and key.split(".")[0] not in FREE_KEYS
        ]
        if differ:
            raise ValueError(
                f"{self.path} holds a run with other settings ({'; '.join(differ)}); give another run_dir, or the same settings"
            )

    def _steps(self) -> list[int]:
        found = (re.fullmatch(r"step-(\d+)", p.name) for p in self.checkpoints.glob("step-*"))
        return sorted(int(match[1]) for match in found if match)

    def save(self, engine: Engine, step: int, keep_last: int) -> None:
        """Write the state after `step` steps aside and rename it into place; collective over ranks."""
        temporary, final = self.checkpoints / f"tmp-{step}", self.checkpoints / f"step-{step}"
        if final.exists():
            return
        engine.save(temporary)
        distributed.barrier()
        if distributed.rank() == 0:
            state = {"step": step, "world_size": distributed.world_size()}
            (temporary / "state.json").write_text(json.dumps(state))
            sync_tree(temporary)
            temporary.rename(final)
            sync_path(self.checkpoints)
            for old in self._steps()[:-keep_last]:
                shutil.rmtree(self.checkpoints / f"step-{old}")
        distributed.barrier()

    def load(self, engine: Engine, step: int) -> None:
        folder = self.checkpoints / f"step-{step}"
        saved = json.loads((folder / "state.json").read_text())
        if saved["world_size"] != distributed.world_size():
            raise ValueError(
                f"{folder} was written by {saved['world_size']} ranks and this run has {distributed.world_size()}; resume with "
                f"the same number (torchrun --nproc_per_node {saved['world_size']})"
            )
        engine.load(folder)

    def truncate_logs(self, step: int) -> None:
        """Drop what a killed run logged beyond its last checkpoint, a torn last line included."""
        for name in ("metrics.jsonl", "timing.jsonl", "rollouts.jsonl"):
            path = self.path / name
            if path.exists():
                kept = [line for line in path.read_text().splitlines(keepends=True) if _logged_step(line) <= step]
                write_atomically(path, "".join(kept))

    def log(self, name: str, record: dict) -> None:
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _logged_step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")


def flatten(tree: dict, prefix: str = "") -> dict:
    """{"rl": {"steps": 3}} to {"rl.steps": 3}."""
    flat = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        sync_path(path)
    sync_path(folder)
