"""`python -m memrl.data`: data sets in the custom format from published ones, and documents of the miniature's own."""

import argparse
from pathlib import Path
from typing import NoReturn

from memrl.cli import fail, user_errors


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is answered by one line instead of the usage."""

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see {self.prog} --help)")


def positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m memrl.data", description="Make data sets and documents.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    hotpotqa = commands.add_parser(
        "hotpotqa",
        help="HotpotQA questions on documents of any number of paragraphs",
        description="Each question's own paragraphs among others drawn at random, numbered and shuffled.",
    )
    hotpotqa.add_argument("input", type=Path, metavar="INPUT", help="HotpotQA file, .json or .json.gz")
    hotpotqa.add_argument("--out", type=Path, required=True, help="the JSON lines file to write")
    hotpotqa.add_argument("--documents", type=positive, required=True, help="paragraphs in each document")
    hotpotqa.add_argument("--seed", type=int, default=0, help="of the draw and the order (default: 0)")
    hotpotqa.add_argument("--limit", type=positive, help="only the first so many questions")
    hotpotqa.add_argument(
        "--pool",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="more paragraphs to draw from: HotpotQA files, or lists of objects with title and text",
    )
    needle = commands.add_parser(
        "needle",
        help="a document of the miniature's own language, to be read by infer.py",
        description="Writes a text file and prints the question to ask of it, with its answer.",
    )
    needle.add_argument("--chunks", type=positive, required=True, help="length of the document")
    needle.add_argument("--out", type=Path, required=True, help="the text file to write")
    needle.add_argument("--seed", type=int, default=0, help="of all draws (default: 0)")
    return parser


def run_needle(arguments: argparse.Namespace) -> None:
    from memrl.data.needle import make_sample
    from memrl.files import write_whole

    check_out(arguments.out)
    sample = make_sample(arguments.chunks, arguments.seed)
    write_whole(arguments.out, sample.context + "\n")
    place = sample.metadata["needle_chunk"] + 1
    print(f"{arguments.out}: {arguments.chunks} chunks, the fact stands in chunk {place}")
    print(f'ask "{sample.question}"; the answer is "{sample.answers[0]}"')


def check_out(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.parent}; make it first")


def run_hotpotqa(arguments: argparse.Namespace) -> None:
    from memrl.data.hotpotqa import build_samples, read_pool, read_questions, write_jsonl

    inputs = [arguments.input, *arguments.pool]
    if any(arguments.out.resolve() == path.resolve() for path in inputs):
        raise ValueError(f"--out {arguments.out}: is an input file too; choose another name")
    check_out(arguments.out)
    questions = read_questions(arguments.input)
    pool = [paragraph for path in arguments.pool for paragraph in read_pool(path)]
    rows = build_samples(questions, arguments.documents, arguments.seed, pool, arguments.limit)
    count = write_jsonl(arguments.out, rows)
    print(f"{arguments.out}: {count} questions, {arguments.documents} documents each")


def main() -> None:
    arguments = build_parser().parse_args()
    with user_errors():
        {"hotpotqa": run_hotpotqa, "needle": run_needle}[arguments.command](arguments)


if __name__ == "__main__":
    main()
