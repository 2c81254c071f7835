"""Train a memory agent. Without arguments: the miniature, from random weights, on whatever is there.

python train.py
torchrun --nproc_per_node 8 train.py --config configs/memagent_7b.yaml --model.path DIR --data.path FILE
python train.py --config configs/memagent_7b.yaml --model.path DIR --dry_run
"""

import sys
from dataclasses import dataclass, fields
from pathlib import Path

from memrl.config import TrainConfig, validate, validate_start
from memrl.training.dry_run import DEFAULT_GPU_GIB, DEFAULT_GPUS, dry_run
from memrl.utils.command_line import Parser, user_errors

DEFAULT_CONFIG = Path(__file__).resolve().parent / "configs" / "tiny.yaml"


@dataclass
class DryRun:
    """Options beside the run's settings: whether to plan the memory only, for how many GPUs, of how many GiB."""

    dry_run: bool
    dry_gpus: str | None
    gpu_gib: float | None


def parse(arguments: list[str]) -> TrainConfig:
    return parse_all(arguments)[0]


def parse_all(arguments: list[str]) -> tuple[TrainConfig, DryRun]:
    parser = Parser(
        prog="train.py",
        usage="train.py [--config FILE ...] [--run_dir DIR] [--rl.clip_high 0.28] [--KEY VALUE ...]",
        description="Train a memory agent by reinforcement learning. Later --config files and options override earlier ones; "
        "without any --config, configs/tiny.yaml trains the miniature. The same command again resumes the run.",
    )
    parser.add_argument("--config", action="config", help="a YAML file of settings; may be given several times")
    parser.add_argument(
        "--dry_run", action="store_true", help="read no weights: print the memory that each GPU would need, and whether it fits"
    )
    parser.add_argument("--dry_gpus", type=str | None, help=f"dry run: numbers of GPUs (default: {DEFAULT_GPUS})")
    parser.add_argument("--gpu_gib", type=float | None, help=f"dry run: memory of a GPU (default: {DEFAULT_GPU_GIB}, of 80 GB)")
    parser.add_class_arguments(TrainConfig)
    if not any(argument == "--config" or argument.startswith("--config=") for argument in arguments):
        arguments = ["--config", str(DEFAULT_CONFIG), *arguments]
    settings = parser.instantiate(parser.parse_args(arguments)).as_dict()
    settings.pop("config")
    dry = DryRun(**{option.name: settings.pop(option.name) for option in fields(DryRun)})
    if not dry.dry_run and (dry.dry_gpus is not None or dry.gpu_gib is not None):
        raise ValueError("dry_gpus and gpu_gib are options of the dry run; add --dry_run, or leave them out")
    return TrainConfig(**settings), dry


def main(arguments: list[str]) -> int:
    with user_errors():
        config, dry = parse_all(arguments)
        validate(config)
        if dry.dry_run:
            return dry_run(config, dry.dry_gpus, dry.gpu_gib)
        validate_start(config)
    # Late, because torch and DeepSpeed take seconds, which --help and mistakes need not wait for.
    from memrl.training.run import run

    return run(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
