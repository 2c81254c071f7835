"""Whether a run is the one that its folder holds, and whether all machines run the same one."""

import socket
import time
from pathlib import Path

from memrl.config import TrainConfig, differences, flatten
from memrl.engine import distributed

# What may change when a run is taken up again without making it another run: where it is, how its work is cut, what it
# keeps and shows. A longer reward.timeout_s is how a run goes on whose verifier turned out slow.
FREE_KEYS = (
    "run_dir",
    "resume",
    "device",
    "threads",
    "checkpoint",
    "validation",
    "log",
    "report",
    "reward.workers",
    "reward.timeout_s",
    "model.attention",
    "model.checkpoint_layers",
    "rollout.max_rows",
    "rollout.max_step_tokens",
    "rollout.cache_gib",
    "rollout.share_prefixes",
    "rl.reference",
    "rl.micro_batch_tokens",
    "engine.persistence_threshold",
)

# What the machines of one run need not agree about: where things are on their disks, and how each does its own part.
MACHINE_KEYS = (
    "run_dir",
    "threads",
    "model.path",
    "data.path",
    "agent.prompts",
    "validation.path",
    "reward.function",
    "reward.workers",
    "rollout.max_rows",
    "rollout.max_step_tokens",
    "rollout.cache_gib",
    "rollout.share_prefixes",
)

VISIBLE_S = 10.0  # network disks show other machines a new file a little later


def changes(old: dict, new: dict) -> list[str]:
    """What makes `new` another run than `old`, each as "key: old -> new"; flat settings."""
    old = flatten(TrainConfig().to_dict()) | old  # a key that was not there yet had its default's effect
    free = FREE_KEYS
    if new["optim.min_lr_ratio"] == 1:
        free += ("rl.steps",)  # with a constant rate a longer run begins like the shorter one
    return differences(old, new, free)


def disagreement(theirs: dict, mine: dict) -> str | None:
    """What keeps this rank, with the settings `mine`, from training with rank 0, which has `theirs`."""
    if differ := differences(flatten(theirs), flatten(mine), MACHINE_KEYS):
        return f"{_who()} has other settings or files than rank 0 ({'; '.join(differ)}); all machines need the same"
    return None


def sees(path: Path, content: str) -> bool:
    """Whether this machine finds what rank 0 wrote; one with a disk of its own would put its part of a checkpoint nowhere."""
    deadline = time.monotonic() + VISIBLE_S
    while True:
        try:
            if path.read_text() == content:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def unseen(folder: Path) -> str:
    return f"{_who()} does not find what rank 0 writes into {folder.resolve()}; give a run_dir on a disk that all machines share"


def _who() -> str:
    return f"rank {distributed.rank()} on {socket.gethostname()}"
