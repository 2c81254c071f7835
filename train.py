"""Train a memory agent. Without arguments: the miniature, from random weights, on whatever is there.

    python train.py
    torchrun --nproc_per_node 8 train.py --config configs/memagent_7b.yaml --model.path DIR --data.path FILE
"""

import sys
from pathlib import Path

from memrl.cli import Parser, user_errors
from memrl.config import TrainConfig, validate, validate_start

DEFAULT_CONFIG = Path(__file__).resolve().parent / "configs" / "tiny.yaml"


def parse(arguments: list[str]) -> TrainConfig:
    parser = Parser(
        prog="train.py",
        usage="train.py [--config FILE ...] [--run_dir DIR] [--rl.clip_high 0.28] [--KEY VALUE ...]",
        description="Train a memory agent by reinforcement learning. Later --config files and options override earlier ones; "
        "without any --config, configs/tiny.yaml trains the miniature. The same command again resumes the run.",
    )
    parser.add_argument("--config", action="config", help="a YAML file of settings; may be given several times")
    parser.add_class_arguments(TrainConfig)
    if not any(argument == "--config" or argument.startswith("--config=") for argument in arguments):
        arguments = ["--config", str(DEFAULT_CONFIG), *arguments]
    settings = parser.instantiate(parser.parse_args(arguments)).as_dict()
    settings.pop("config")
    return TrainConfig(**settings)


def main(arguments: list[str]) -> int:
    with user_errors():
        config = parse(arguments)
        validate(config)
        validate_start(config)
    # Late, because torch and DeepSpeed take seconds, which --help and mistakes need not wait for.
    from memrl.rl.run import run

    return run(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
