"""Read files and answer questions: `memrl infer` from a checkout."""

import sys

from memrl.commands.infer import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "infer.py"))
