"""`python -m memrl.data ruler`: RULER's tasks as data sets, a file for each task and length."""

import argparse
from pathlib import Path

from memrl.data.commands.options import lengths, positive


def add_command(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "ruler",
        help="RULER's 13 tasks on documents of an exact number of tokens",
        description="Writes TASK_LENGTH.FORMAT for each task and length. The same command goes on where it was stopped.",
    )
    parser.add_argument("--tasks", default="all", metavar="A,B", help="names, separated by commas (default: all 13)")
    parser.add_argument("--lengths", type=lengths, required=True, metavar="4k,1m", help="tokens that a sample takes in all")
    parser.add_argument("--samples", type=positive, default=128, metavar="N", help="of each task and length (default: 128)")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="folder of the model or of its tokenizer")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where to write; made where it does not exist")
    parser.add_argument("--essays", metavar="PATH", help="text to hide needles in: a folder of .txt files, or one file")
    parser.add_argument("--squad", metavar="FILE", help="SQuAD questions, for qa_1")
    parser.add_argument("--hotpotqa", metavar="FILE", help="HotpotQA questions, for qa_2")
    parser.add_argument("--pool", nargs="+", default=[], metavar="FILE", help="more paragraphs for qa_1 and qa_2 to draw from")
    parser.add_argument(
        "--repeat",
        choices=("refuse", "report"),
        default="refuse",
        help="too few paragraphs for a length of qa_1 or qa_2: refuse it (default), or repeat some and say so in the metadata",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default: 0)")
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet", help="of the files (default: parquet)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from memrl.data import write_samples
    from memrl.data.ruler import RulerFiles, make_ruler
    from memrl.tokenizer import load_tokenizer

    names = parse_tasks(arguments.tasks)
    if arguments.out.exists() and not arguments.out.is_dir():
        raise ValueError(f"--out {arguments.out}: is a file; give the name of a folder")
    files = RulerFiles(arguments.essays, arguments.squad, arguments.hotpotqa, arguments.pool, arguments.repeat)
    tokenizer = load_tokenizer(arguments.tokenizer)
    tasks = {name: make_ruler(name, tokenizer, files) for name in names}  # all of them first: a missing file is told at once
    for name, task in tasks.items():
        if task.num_questions is not None and task.num_questions < arguments.samples:
            raise ValueError(f"--samples {arguments.samples}: {name} has {task.num_questions} questions; give that many or fewer")
    for name, task in tasks.items():  # and both ends of the lengths: what cannot be made is told before anything is written
        task.sample(arguments.lengths[0], 0, arguments.seed)
        if name in ("qa_1", "qa_2"):
            task.check(arguments.lengths[-1])
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, task in tasks.items():
        for length in arguments.lengths:
            path = arguments.out / f"{name}_{length}.{arguments.format}"
            recipe = {"task": name, "length": length, "seed": arguments.seed, "version": task.version}
            make = _maker(task, length, arguments.seed)
            write_samples(path, make, arguments.samples, recipe, path.stem)
            print(f"{path}: {arguments.samples} samples")


def _maker(task, length: int, seed: int):
    return lambda index: task.sample(length, index, seed)


def parse_tasks(text: str) -> list[str]:
    """`all`, or names separated by commas, each once.

    Raises:
        ValueError: a name that is none, or one given twice.
    """
    from memrl.data.ruler import TASKS

    if text == "all":
        return list(TASKS)
    names = [name.strip() for name in text.split(",")]
    for place, name in enumerate(names):
        if name not in TASKS:
            raise ValueError(f"--tasks: there is no task {name!r}; give all, or some of {', '.join(TASKS)}")
        if name in names[:place]:
            raise ValueError(f"--tasks: {name} is given twice; give each task once")
    return names
