"""`python -m memrl.data needle`: a document of the miniature's own language as a text file."""

import argparse
from pathlib import Path

from memrl.data.commands.options import check_out, positive


def add_command(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "needle",
        help="a document of the miniature's own language, to be read by infer.py",
        description="Writes a text file and prints the question to ask of it, with its answer.",
    )
    parser.add_argument("--chunks", type=positive, required=True, help="length of the document")
    parser.add_argument("--out", type=Path, required=True, help="the text file to write")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default: 0)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from memrl.data.needle import make_sample
    from memrl.utils.files import write_whole

    check_out(arguments.out)
    sample = make_sample(arguments.chunks, arguments.seed)
    write_whole(arguments.out, sample.context + "\n")
    place = sample.metadata["needle_chunk"] + 1
    print(f"{arguments.out}: {arguments.chunks} chunks, the fact stands in chunk {place}")
    print(f'ask "{sample.question}"; the answer is "{sample.answers[0]}"')
