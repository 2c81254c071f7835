"""`python -m memrl.data ruler_hotpotqa`: the same HotpotQA questions on documents of several lengths, a file for each."""

import argparse
from functools import partial
from pathlib import Path

from memrl.data.commands.hotpotqa import Repeats, add_drawing
from memrl.data.commands.options import check_out, lengths, positive


def add_command(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "ruler_hotpotqa",
        help="the same HotpotQA questions on documents of 50 to 25,600 paragraphs",
        description="Writes FOLDER/ruler_hotpotqa_N.FORMAT for each number of documents N, the same questions in each.",
    )
    parser.add_argument("input", type=Path, metavar="INPUT", help="HotpotQA file: .json, .json.gz, or the hub's .parquet")
    parser.add_argument("--documents", type=lengths, required=True, metavar="N,N", help="paragraphs in each document: 50,200,800")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the files go; is made")
    parser.add_argument("--samples", type=positive, default=128, help="the first so many questions (default: 128)")
    add_drawing(parser)
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet", help="of the files (default: parquet)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from memrl.data import write_samples
    from memrl.data.ruler import RulerFiles
    from memrl.data.ruler_hotpotqa import RulerHotpotQA

    check_out(arguments.out)
    files = RulerFiles(hotpotqa=str(arguments.input), pool=[str(path) for path in arguments.pool], repeat=arguments.repeat)
    task = RulerHotpotQA(files)
    count = min(arguments.samples, task.num_questions)
    fewer = f" (all that there are, not {arguments.samples})" if count < arguments.samples else ""
    arguments.out.mkdir(exist_ok=True)
    for documents in arguments.documents:
        path = arguments.out / f"{task.name}_{documents}.{arguments.format}"
        recipe = {"command": task.name, "version": task.version, "documents": documents, "seed": arguments.seed}
        recipe["repeat"] = arguments.repeat
        make = Repeats(partial(_sample, task, documents, arguments.seed))
        write_samples(path, make, count, recipe, f"{documents} documents")
        print(f"{path}: {count} questions{fewer}, {documents} documents each{make.report()}")


def _sample(task, documents: int, seed: int, index: int):
    return task.sample(documents, index, seed)
