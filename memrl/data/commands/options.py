"""What the commands of `python -m memrl.data` share: the parser, and the kinds of their arguments."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from memrl.utils.command_line import fail
from memrl.utils.lengths import read_length

SUFFIXES = (".jsonl", ".parquet")


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is answered by one line instead of the usage."""

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see {self.prog} --help)")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def length(text: str) -> int:
    """A length such as `800`, `32k` or `1m`; k is 1024 and m is 1024 * 1024, as in `eval.py`."""
    value = read_length(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a length; give a positive whole number like 800, 32k or 1m")
    return value


def lengths(text: str) -> list[int]:
    """Several lengths, `4k,32k,1m`, in rising order."""
    values = [length(part) for part in text.split(",")]
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text!r} holds a length twice; give each once")
    return sorted(values)


def add_out(parser: argparse.ArgumentParser) -> None:
    """`--out`, the data set to write."""
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="what to write, .jsonl or .parquet")


def check_out(path: Path, inputs: Iterable[Path] = (), suffixes: tuple[str, ...] = ()) -> None:
    """Raise ValueError where `path` cannot be written: no folder, one of `inputs`, or none of `suffixes` (if given)."""
    if any(path.resolve() == source.resolve() for source in inputs):
        raise ValueError(f"--out {path}: is an input file too; choose another name")
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"--out {path}: has to end in {' or '.join(suffixes)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.parent}; make it first")
