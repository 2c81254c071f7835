"""Check that settings match the run in the folder, and that all machines run the same one.

To extend a finished run, give the same command with a larger rl.steps. This works if optim.min_lr_ratio is 1: with a constant
learning rate the longer run begins like the shorter one. With a falling rate each step's rate depends on rl.steps, so another
value is refused; start a new run from the finished one's model/ instead (--model.path RUN/model --run_dir NEW; not for the
miniature). A smaller rl.steps ends a run earlier, but not before the steps it has done.
"""

import json
import socket
import time
from contextlib import suppress
from pathlib import Path

import yaml

from memrl.config import TrainConfig, differences, flatten
from memrl.engine import distributed

# Keys that may change when a run is resumed and may differ between its machines: a path, and how each batches its own part.
LOCAL_KEYS = (
    "run_dir",
    "threads",
    "reward.workers",
    "rollout.max_rows",
    "rollout.max_step_tokens",
    "rollout.cache_gib",
    "rollout.share_prefixes",
)
# Further keys and sections that may change when a run is resumed, because training does not depend on them: devices, batching,
# saving, logging. reward.timeout_s is here so that a run with a slow reward function can go on.
FREE_KEYS = (
    *LOCAL_KEYS,
    "resume",
    "device",
    "checkpoint",
    "validation",
    "log",
    "report",
    "reward.timeout_s",
    "reward.memory_gib",
    "reward.max_failed_steps",
    "model.attention",
    "model.checkpoint_layers",
    "rl.reference",
    "rl.micro_batch_tokens",
    "engine.persistence_threshold",
)
# Paths on the machines' own disks.
MACHINE_KEYS = (*LOCAL_KEYS, "model.path", "data.path", "agent.prompts", "validation.path", "reward.function")

VISIBLE_S = 10.0  # network disks show a new file to other machines a little later


def check_same_run(folder: Path, settings: dict) -> None:
    """Check the settings and inputs of a run against config.yaml and inputs.json in its folder.

    Raises:
        ValueError: they differ, with each difference and the keys that may change; or the files cannot be read.
    """
    try:
        old = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        old |= {"inputs": json.loads((folder / "inputs.json").read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        raise ValueError(
            f"config.yaml or inputs.json in {folder} is missing or damaged, so its run cannot be resumed; choose another run_dir"
        ) from None
    new = flatten(settings)
    constant_rate = new["optim.min_lr_ratio"] == 1
    free = (*FREE_KEYS, "rl.steps") if constant_rate else FREE_KEYS
    # A key that the folder does not know is newer than the run, which had its default's effect.
    found = differences(flatten(TrainConfig().to_dict()) | flatten(old), new, free)
    if not found:
        return
    longer = "" if constant_rate else ", and rl.steps if optim.min_lr_ratio is 1 (otherwise the learning rate depends on it)"
    raise ValueError(
        f"{folder} holds a run with other settings ({'; '.join(found)}); give another run_dir, or the same settings. Only these "
        f"may change: {', '.join(free)}{longer}"
    )


def disagreement(theirs: dict, mine: dict) -> str | None:
    """The message if this rank's settings, `mine`, differ from rank 0's, `theirs`; None if they match."""
    if differ := differences(flatten(theirs), flatten(mine), MACHINE_KEYS):
        return f"{_who()} has other settings or files than rank 0 ({'; '.join(differ)}); all machines need the same"
    return None


def unseen(path: Path, content: str) -> str | None:
    """The message if this machine cannot read what rank 0 wrote: its part of a checkpoint would be lost on its own disk."""
    deadline = time.monotonic() + VISIBLE_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            if path.read_text() == content:
                return None
        time.sleep(0.1)
    folder = path.parent.resolve()
    return f"{_who()} cannot read what rank 0 writes into {folder}; give a run_dir on a disk that all machines share"


def _who() -> str:
    return f"rank {distributed.rank()} on {socket.gethostname()}"
