"""`python -m memrl.data check`: reads a whole data set, names its first mistake, and otherwise prints what is in it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memrl.types import Sample

TENTHS = 10
SHOWN = 200  # characters of the first sample's document


def add_command(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "check",
        help="check a data set and print what is in it",
        description="Reads every sample and prints lengths, answers, where the evidence stands, and the first sample.",
    )
    parser.add_argument("input", type=Path, metavar="INPUT", help=".jsonl or .parquet file, or a folder of .parquet files")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="count tokens too, with this folder's tokenizer")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from memrl.data import load_samples
    from memrl.utils.progress import Progress

    encode = None
    if arguments.tokenizer is not None:
        from memrl.tokenizer import load_tokenizer

        encode = load_tokenizer(arguments.tokenizer).encode
    samples = load_samples(arguments.input)
    characters, tokens, answers, depths, every_answer = [], [], [], [], 0
    with Progress("check", len(samples), "samples") as progress:
        for sample in samples:
            characters.append(len(sample.context))
            answers.append(len(sample.answers))
            every_answer += sample.match == "all"
            depths += evidence_depths(sample)
            if encode is not None:
                tokens.append(len(encode(sample.context)))
            progress.advance()
    print(f"{samples.name}: {len(samples)} samples, no mistakes")
    print(spread("characters", characters))
    if tokens:
        print(spread("tokens", tokens))
    print(spread("answers", answers) + (f"; all have to be named in {every_answer} samples" if every_answer else ""))
    print(histogram(depths))
    print("\n".join(describe_sample(samples[0])))


def evidence_depths(sample: Sample) -> list[float]:
    """Where each piece of evidence begins, as a share of the document: `depths`, or what `evidence` says in characters."""
    if depths := sample.metadata.get("depths"):
        return list(depths)
    begins = [piece.get("begin") for piece in sample.metadata.get("evidence", ())]
    return [begin / max(1, len(sample.context)) for begin in begins if begin is not None]


def spread(name: str, values: Sequence[int]) -> str:
    return f"{name:<12}min {min(values):,}   mean {sum(values) / len(values):,.1f}   max {max(values):,}"


def histogram(depths: Iterable[float]) -> str:
    """How many pieces of evidence begin in each tenth of their documents."""
    counts = [0] * TENTHS
    for depth in depths:
        counts[min(TENTHS - 1, int(depth * TENTHS))] += 1
    if not sum(counts):
        return f"{'evidence':<12}not marked"
    return f"{'evidence':<12}{'  '.join(map(str, counts))}   by tenths of the document"


def describe_sample(sample: Sample) -> list[str]:
    shown = " ".join(sample.context[:SHOWN].split()) + (" ..." if len(sample.context) > SHOWN else "")
    return [
        "",
        f"first sample {sample.id}",
        f"question    {sample.question}",
        f"answers     {' | '.join(sample.answers)}",
        f"metadata    {', '.join(sample.metadata) or 'none'}",
        f"document    {shown}",
    ]
