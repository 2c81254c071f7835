"""Train a memory agent: `memrl train` from a checkout, as torchrun starts it."""

import sys

from memrl.commands.train import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "train.py"))
