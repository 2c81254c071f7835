"""`memrl train`: train a memory agent. Without arguments: the miniature, from random weights, on the CPU or the GPUs there are.

memrl train
torchrun --nproc_per_node 8 train.py --config configs/memagent_7b.yaml --model.path DIR --data.path FILE
memrl train --config configs/memagent_7b.yaml --model.path DIR --dry_run
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from memrl.config import TrainConfig, validate, validate_start
from memrl.training.dry_run import DEFAULT_GPU_GIB, DEFAULT_GPUS, dry_run
from memrl.utils.command_line import PACKAGED_CONFIGS, argument, fail, parse_options, user_errors

DEFAULT_CONFIG = PACKAGED_CONFIGS / "tiny.yaml"


@dataclass
class DryRun:
    """Plan the memory of a run without starting it."""

    dry_run: bool = argument(
        "--dry_run", action="store_true", default=False, help="read no weights: print the memory that each GPU would need"
    )
    dry_gpus: str | None = argument(
        "--dry_gpus", type=str | None, default=None, help=f"numbers of GPUs to plan for ({DEFAULT_GPUS} if not given)"
    )
    gpu_gib: float | None = argument(
        "--gpu_gib", type=float | None, default=None, help=f"memory of a GPU ({DEFAULT_GPU_GIB} if not given, a GPU of 80 GB)"
    )


def parse(arguments: Sequence[str]) -> TrainConfig:
    return parse_all(arguments, "memrl train")[0]


def parse_all(arguments: Sequence[str], prog: str) -> tuple[TrainConfig, DryRun]:
    if not any(argument == "--config" or argument.startswith("--config=") for argument in arguments):
        arguments = ["--config", str(DEFAULT_CONFIG), *arguments]
    config, dry = parse_options(
        (TrainConfig, DryRun),
        arguments,
        prog=prog,
        usage="[--config FILE ...] [--run_dir DIR] [--rl.clip_high 0.28] [--KEY VALUE ...]",
        description="Train a memory agent by reinforcement learning. Later --config files and options override earlier ones; "
        "without any --config, configs/tiny.yaml trains the miniature. The same command again resumes the run.",
        config=True,
    )
    if not dry.dry_run and (dry.dry_gpus is not None or dry.gpu_gib is not None):
        raise ValueError("dry_gpus and gpu_gib are options of the dry run; add --dry_run, or leave them out")
    return config, dry


def main(arguments: Sequence[str], prog: str = "memrl train") -> int:
    """The exit code, as of `memrl.training.run.run`; 2 for mistakes."""
    with user_errors():
        config, dry = parse_all(arguments, prog)
        validate(config)
        if dry.dry_run:
            return dry_run(config, dry.dry_gpus, dry.gpu_gib)
        validate_start(config)
    if find_spec("deepspeed") is None:
        fail("training needs DeepSpeed: install memrl with its extra 'train', in a checkout by pip install '.[train]'")
    # Late, because torch and DeepSpeed take seconds, which --help and mistakes need not wait for.
    from memrl.training.run import run

    return run(config)
