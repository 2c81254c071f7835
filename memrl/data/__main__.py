"""`python -m memrl.data`: data sets of long documents from published questions, checked, filtered and converted."""

import argparse
import importlib
import sys

from memrl.data.commands.options import Parser
from memrl.utils.command_line import user_errors

# Module in memrl.data.commands -> what the list of commands says. Only the module of the command that is given is imported.
COMMANDS = {
    "hotpotqa": "HotpotQA questions on documents of any number of paragraphs or tokens",
    "squad": "SQuAD questions on such documents",
    "musique": "MuSiQue questions on such documents",
    "ruler": "the 13 RULER tasks at exact lengths in tokens",
    "ruler_hotpotqa": "the same HotpotQA questions on documents of 50 to 25,600 paragraphs",
    "filter": "drop the questions that a model answers without the document",
    "check": "check a data set and print what is in it",
    "convert": "write a data set in the other format",
    "needle": "a document of the miniature's own language, to be read by infer.py",
}


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, of which only `chosen` has its arguments."""
    parser = Parser(prog="python -m memrl.data", description="Make, check, filter and convert data sets.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        if name == chosen:
            importlib.import_module(f"memrl.data.commands.{name}").add_command(commands)
        else:
            commands.add_parser(name, help=text)
    return parser


def main() -> None:
    chosen = sys.argv[1] if len(sys.argv) > 1 else None
    arguments = build_parser(chosen).parse_args()
    try:
        with user_errors():
            arguments.run(arguments)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
