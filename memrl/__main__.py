"""The command `memrl`, also `python -m memrl`.

Exit codes: 0; 1 if the work failed, or standard output cannot be written (a closed pipe, a full disk); 2 for mistakes in what was
given; 130, 143 and 129 after Ctrl-C, SIGTERM and SIGHUP.
"""

import pkgutil
import sys
from collections.abc import Mapping, Sequence

from memrl.utils.command_line import fail
from memrl.utils.process import run_command

# For each name a function (arguments, prog) -> exit code in memrl.commands, or the commands below it; and its help.
DATA = {
    "hotpotqa": ("build_dataset:Hotpotqa.main", "HotpotQA questions on documents of any number of paragraphs or tokens"),
    "squad": ("build_dataset:Squad.main", "SQuAD questions on such documents"),
    "musique": ("build_dataset:Musique.main", "MuSiQue questions on such documents"),
    "ruler": ("build_dataset:Ruler.main", "the 13 RULER tasks at exact lengths in tokens"),
    "ruler_hotpotqa": ("build_dataset:RulerHotpotqa.main", "the same HotpotQA questions on documents of 50 to 25,600 paragraphs"),
    "needle": ("build_dataset:Needle.main", "a text file in the miniature's own language, to be read by `memrl infer`"),
    "filter": ("filter_dataset:Filter.main", "drop the questions that a model answers without the document"),
    "check": ("check_dataset:Check.main", "check a data set and print what is in it"),
    "convert": ("check_dataset:Convert.main", "write a data set in the other format"),
}
PROMPTS = {"import": ("prompts:Import.main", "the original MemAgent's prompts, from a copy of its repository")}
COMMANDS = {
    "train": ("train:main", "train a memory agent by reinforcement learning"),
    "infer": ("infer:main", "read files and answer questions about them"),
    "eval": ("eval:main", "measure a model by document length"),
    "data": (DATA, "build, check, filter and convert data sets"),
    "report": ("report:Report.main", "compare results of eval: tables and pictures"),
    "trace": ("report:Trace.main", "show a training run's sample rollouts as a web page"),
    "curves": ("report:Curves.main", "draw learning curves of training runs"),
    "prompts": (PROMPTS, "make prompt files"),
}
Commands = Mapping[str, tuple["str | Commands", str]]


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    description = "Language models that read long documents with a fixed-size memory."
    return run_command(dispatch, "memrl", description, COMMANDS, arguments)


def dispatch(prog: str, description: str, commands: Commands, arguments: Sequence[str]) -> int:
    """Run the command that the first arguments name; only its module is imported."""
    names = ", ".join(commands)
    if not arguments:
        fail(f"give a command: {names} (see {prog} --help)")
    name, *rest = arguments
    if name in commands:
        target, text = commands[name]
        if not isinstance(target, str):
            return dispatch(f"{prog} {name}", f"{text.capitalize()}.", target, rest)
        return pkgutil.resolve_name(f"memrl.commands.{target}")(rest, f"{prog} {name}")
    if name not in ("-h", "--help"):
        fail(f"there is no command {name!r}; the commands are {names} (see {prog} --help)")
    width = max(map(len, commands))
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in commands.items())
    print(f"usage: {prog} COMMAND ...\n\n{description}\n\ncommands:\n{listed}\n\n{prog} COMMAND --help explains one of them.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
