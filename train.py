"""Train a memory agent: `memrl train` from a checkout, as torchrun starts it."""

import sys

from memrl.commands.train import main
from memrl.utils.process import run_command

if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:], "train.py"))
