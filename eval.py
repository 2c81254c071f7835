"""Measure a model by document length: `memrl eval` from a checkout, as torchrun starts it."""

import sys

from memrl.commands.eval import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "eval.py"))
