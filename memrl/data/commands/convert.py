"""`python -m memrl.data convert`: a data set in the other format, or several parquet files as one."""

import argparse
from pathlib import Path

from memrl.data.commands.options import SUFFIXES, add_out, check_out


def add_command(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "convert",
        help="write a data set in the other format",
        description="Reads JSON lines or parquet, the original's published files and folders of parquet files included, and "
        "writes memrl's own columns; documents in files of their own are taken in.",
    )
    parser.add_argument("input", type=Path, metavar="INPUT", help=".jsonl or .parquet file, or a folder of .parquet files")
    add_out(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from memrl.data import load_samples, write_samples
    from memrl.utils.files import fingerprint

    check_out(arguments.out, [arguments.input], SUFFIXES)
    samples = load_samples(arguments.input)
    recipe = {"command": "convert", "input": fingerprint(samples.paths)}
    write_samples(arguments.out, samples.__getitem__, len(samples), recipe, "convert")
    print(f"{arguments.out}: {len(samples)} samples")
