"""Check that a folder may be used, that settings match the run in it, and that all machines run the same one.

To extend a finished run, give the same command with a larger rl.steps. This works if optim.min_lr_ratio is 1: with a constant
learning rate the longer run begins like the shorter one. With a falling rate each step's rate depends on rl.steps, so another
value is refused; start a new run from the finished one's model/ instead (--model.path RUN/model --run_dir NEW; not for the
miniature). A smaller rl.steps ends a run earlier, but not before the steps it has done.
"""

import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

from memrl.config import TrainConfig, differences, flatten
from memrl.engine import distributed
from memrl.utils.bounded_files import read_json, read_yaml
from memrl.utils.command_line import warn
from memrl.utils.plain_text import printable

# Not in the inputs.json of runs of earlier versions; see memrl/training/inputs.py.
LATER_INPUTS = {"weights", "tokenizer", "documents", "reward_modules"}
LOCK = ".lock"
LOGS = ("metrics.jsonl", "timing.jsonl", "validation.jsonl", "rollouts.jsonl")
# All that a run writes, and so replaces; see memrl/training/checkpoint.py.
OWN = ("config.yaml", "inputs.json")
REPORTS = ("curves.png", "report.json", "report.png", "report_before.json", "report_after.json", "wandb_id.txt")
FOLDERS = ("checkpoints", "start", "model", "best", "adapter", "tensorboard", "wandb")

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


def check_place(folder: Path, config: TrainConfig) -> None:
    """Refuse a folder in which a run would replace or delete what no run wrote, or its own base model.

    Raises:
        ValueError: it is a file, or the home, root or memrl's own folder; it holds things under a run's names, but is no run's;
            they are links, pipes or devices; a model, data or prompts are among what the run replaces.
    """
    real = Path(os.path.realpath(folder))
    if nearest := next((path for path in (real, *real.parents) if os.path.lexists(path) and not path.is_dir()), None):
        raise ValueError(f"run_dir {folder}: {nearest} is not a folder; choose another run_dir")
    if real in (Path(real.anchor), Path.home().resolve(), Path(__file__).resolve().parents[2]):
        raise ValueError(f"run_dir {folder} is {real} itself; give the run a folder of its own")
    found = [name for name in (*OWN, *LOGS, *REPORTS, *FOLDERS) if os.path.lexists(folder / name)]
    for name in (*found, LOCK):
        if os.path.lexists(folder / name) and not (_is_folder if name in FOLDERS else _is_plain_file)(folder / name):
            kind = "folder" if name in FOLDERS else "plain file"
            raise ValueError(f"{folder / name} is not a {kind}, so it is not a run's; remove it, or choose another run_dir")
    # A start that was killed leaves its lock, then empty checkpoints/ and inputs.json.
    harmless = {"checkpoints"} if "checkpoints" in found and not os.listdir(folder / "checkpoints") else set()
    harmless |= {"inputs.json"} if (folder / LOCK).exists() else set()
    if not set(found) >= set(OWN) and set(found) - harmless:
        raise ValueError(
            f"run_dir {folder} holds {', '.join(found)}, but not both config.yaml and inputs.json of a run; training would "
            "replace them; choose another run_dir"
        )
    _check_inputs_outside(real, config)


def _check_inputs_outside(run: Path, config: TrainConfig) -> None:
    replaced = {run / name for name in (*OWN, *LOGS, *REPORTS, *FOLDERS)}
    files = {"data.path": config.data.path, "validation.path": config.validation.path, "agent.prompts": config.agent.prompts}
    for name, path in (files | {"reward.function": (config.reward.function or "").rpartition(":")[0]}).items():
        real = Path(os.path.realpath(path or os.sep))
        if replaced & {real, *real.parents}:
            raise ValueError(f"{name} {path} is among the files that the run writes in run_dir {run}; choose another run_dir")
    if config.model.path is not None:
        model = Path(config.model.path)
        sources = [Path(os.path.realpath(path)) for path in (model, *(model.iterdir() if model.is_dir() else ()))]
        if any(run in (source, *source.parents) for source in sources):
            raise ValueError(f"model.path {model} is in run_dir {run}, which would replace it; choose another run_dir")


def _is_plain_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _is_folder(path: Path) -> bool:
    return path.is_dir()


def check_same_run(folder: Path, settings: dict) -> None:
    """Check the settings and inputs of a run against config.yaml and inputs.json in its folder.

    Raises:
        ValueError: they differ, with each difference and the keys that may change; or the files cannot be read.
    """
    try:
        old, inputs = read_yaml(folder / "config.yaml"), read_json(folder / "inputs.json")
        if not isinstance(old, dict) or not isinstance(inputs, dict):
            raise ValueError("not a mapping")
    except ValueError as error:
        raise ValueError(
            f"config.yaml or inputs.json in {folder} is missing or damaged ({error}), so its run cannot be resumed; choose "
            "another run_dir"
        ) from None
    if unknown := sorted(settings["inputs"].keys() & LATER_INPUTS - inputs.keys()):
        what = f"{folder} was begun by an earlier version, which did not record these inputs: {', '.join(unknown)}"
        warn(f"{what}; they are not compared, and recorded from now on")
    old |= {"inputs": {name: settings["inputs"][name] for name in unknown} | inputs}
    new = flatten(settings)
    constant_rate = new["optim.min_lr_ratio"] == 1
    free = (*FREE_KEYS, "rl.steps") if constant_rate else FREE_KEYS
    # A key that the folder does not know is newer than the run, which had its default's effect.
    found = differences(flatten(TrainConfig().to_dict()) | flatten(old), new, free)
    if not found:
        return
    longer = "" if constant_rate else ", and rl.steps if optim.min_lr_ratio is 1 (otherwise the learning rate depends on it)"
    raise ValueError(
        f"{folder} holds a run with other settings ({printable('; '.join(found), 2000)}); give another run_dir, or the same "
        f"settings. Only these may change: {', '.join(free)}{longer}"
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
