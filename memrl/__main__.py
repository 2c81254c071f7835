"""The command `memrl`, also `python -m memrl`."""

import sys
from collections.abc import Sequence

from memrl.utils.command_line import dispatch

COMMANDS = {
    "train": ("train:main", "train a memory agent by reinforcement learning"),
    "infer": ("infer:main", "read files and answer questions about them"),
    "eval": ("eval:main", "measure a model by document length"),
    "data": ("data:main", "build, check, filter and convert data sets"),
    "report": ("report:Report.main", "compare results of eval: tables and pictures"),
    "trace": ("report:Trace.main", "show a training run's sample rollouts as a web page"),
    "curves": ("report:Curves.main", "draw learning curves of training runs"),
    "prompts": ("prompts:main", "make prompt files"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    return dispatch("memrl", "Language models that read long documents with a fixed-size memory.", COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
