"""Read files and answer questions: `memrl infer` from a checkout."""

import sys

from memrl.commands.infer import main
from memrl.utils.process import run_command

if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:], "infer.py"))
