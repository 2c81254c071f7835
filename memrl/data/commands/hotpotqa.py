"""`python -m memrl.data hotpotqa`, and what it shares with `squad` and `musique`: questions on long documents."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memrl.data.commands.options import SUFFIXES, add_out, check_out, length, positive

if TYPE_CHECKING:
    from memrl.types import Sample


def add_command(commands: argparse._SubParsersAction) -> None:
    add_documents_command(commands, "hotpotqa", "HotpotQA", ".json, .json.gz, or the hub's .parquet")


def add_documents_command(commands: argparse._SubParsersAction, kind: str, name: str, layouts: str) -> None:
    """A command that makes documents of any length from one kind of `memrl.data.corpora`."""
    parser = commands.add_parser(
        kind,
        help=f"{name} questions on documents of any number of paragraphs or tokens",
        description="Each question's own paragraphs among others drawn at random, numbered and shuffled.",
    )
    parser.add_argument(
        "input", type=Path, nargs="+", metavar="INPUT", help=f"{name} files, or folders of .parquet files: {layouts}"
    )
    add_out(parser)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--documents", type=positive, help="paragraphs in each document")
    size.add_argument("--tokens", type=length, help="tokens of each document, 32k for example: never more, at most 1%% less")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="the model's folder, whose tokenizer counts the tokens")
    parser.add_argument("--limit", type=positive, help="only the first so many questions")
    add_drawing(parser)
    parser.set_defaults(run=run, kind=kind)


def add_drawing(parser: argparse.ArgumentParser) -> None:
    """`--seed`, `--pool` and `--repeat`: which paragraphs are drawn."""
    parser.add_argument("--seed", type=int, default=0, help="of the draw and the order (default: 0)")
    parser.add_argument(
        "--pool",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="more paragraphs to draw from: HotpotQA, SQuAD or MuSiQue files, or lists of objects with title and text",
    )
    parser.add_argument(
        "--repeat",
        choices=("refuse", "report"),
        default="refuse",
        help="where there are too few paragraphs: refuse, or let them repeat and say how many in each sample (default: refuse)",
    )


def run(arguments: argparse.Namespace) -> None:
    from memrl.data import write_samples
    from memrl.data.corpora import read_pool, read_sources, source_files
    from memrl.data.documents import LongDocuments
    from memrl.data.paragraphs import Pool

    files, pool_files = source_files(arguments.input), source_files(arguments.pool)
    inputs = [*files, *pool_files]
    check_out(arguments.out, inputs, SUFFIXES)
    if bool(arguments.tokens) != bool(arguments.tokenizer):
        raise ValueError("--tokens and --tokenizer belong together; --documents needs neither")
    source = read_sources(files, arguments.kind)
    pool = Pool([*source.paragraphs, *read_pool(pool_files)])
    documents = LongDocuments(pool, _tokenizer(arguments.tokenizer), arguments.repeat)
    questions = source.questions[: arguments.limit]

    def make(index: int) -> "Sample":
        if arguments.tokens:
            return documents.of_tokens(questions[index], arguments.tokens, arguments.seed)
        return documents.of_documents(questions[index], arguments.documents, arguments.seed)

    counted = Repeats(make)
    write_samples(arguments.out, counted, len(questions), _recipe(arguments, inputs), arguments.kind)
    size = f"{arguments.tokens} tokens" if arguments.tokens else f"{arguments.documents} documents"
    left_out = f"; {source.num_unanswerable} without an answer are left out" if source.num_unanswerable else ""
    print(f"{arguments.out}: {len(questions)} questions, {size} each{counted.report()}{left_out}")


class Repeats:
    """Makes samples and counts the copies of paragraphs in them."""

    def __init__(self, make: Callable[[int], "Sample"]):
        self._make, self._repeated, self._documents = make, 0, 0

    def __call__(self, index: int) -> "Sample":
        sample = self._make(index)
        self._repeated += sample.metadata["repeated"]
        self._documents += sample.metadata["num_documents"]
        return sample

    def report(self) -> str:
        """How many of the paragraphs that were written are copies; "" where none is."""
        return f"; {self._repeated} of the {self._documents} paragraphs just written are copies" if self._repeated else ""


def _tokenizer(folder: Path | None):
    if folder is None:
        return None
    from memrl.tokenizer import load_tokenizer

    return load_tokenizer(folder)


def _recipe(arguments: argparse.Namespace, inputs: list[Path]) -> dict[str, Any]:
    from memrl.data.documents import FORMAT
    from memrl.utils.files import fingerprint

    recipe = {
        "command": arguments.kind,
        "format": FORMAT,
        "input": [f"{path.name} {fingerprint([path])}" for path in inputs],
        "seed": arguments.seed,
        "repeat": arguments.repeat,
    }
    if arguments.tokens is None:
        return {**recipe, "documents": arguments.documents}
    files = [arguments.tokenizer / name for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")]
    return {**recipe, "tokens": arguments.tokens, "tokenizer": fingerprint(file for file in files if file.is_file())}
