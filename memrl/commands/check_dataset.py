"""`memrl data check` and `memrl data convert`: read a whole data set; print what is in it, or write it in the other format."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memrl.utils.command_line import Command, allow_files_flag, argument, check_out
from memrl.utils.plain_text import printable

if TYPE_CHECKING:
    from memrl.types import Sample

TENTHS = 10
LONGEST = 1000  # characters of a shown text
SHOWN = 200  # characters of the first sample's document
_INPUT = ".jsonl or .parquet file, or a folder of .parquet files"


@dataclass(kw_only=True)
class Check(Command):
    """Read every sample, name the first mistake, or print lengths, answers, the places of the evidence, and the first sample."""

    input: Path = argument("input", type=Path, metavar="INPUT", help=_INPUT)
    tokenizer: Path | None = None
    """Count tokens too, with the tokenizer of this folder."""
    allow_files: bool = allow_files_flag()

    def run(self) -> None:
        from memrl.data import load_samples
        from memrl.tokenizer import load_tokenizer
        from memrl.utils.progress import Progress

        encode = load_tokenizer(self.tokenizer).encode if self.tokenizer else None
        samples = load_samples(self.input, self.allow_files)
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
        print(f"{printable(samples.name, LONGEST)}: {len(samples)} samples, no mistakes")
        print(spread("characters", characters))
        if tokens:
            print(spread("tokens", tokens))
        print(spread("answers", answers) + (f"; all have to be named in {every_answer} samples" if every_answer else ""))
        print(histogram(depths))
        first = samples[0]
        shown = {"first sample": first.id, "question": first.question, "answers": " | ".join(first.answers)}
        shown |= {"metadata": ", ".join(first.metadata) or "none"}
        print()
        for name, text in shown.items():
            print(f"{name:<12}{' ' * (name == 'first sample')}{printable(text, LONGEST)}")
        print(f"document    {printable(first.context[:SHOWN], LONGEST)}{' ...' * (len(first.context) > SHOWN)}")


@dataclass(kw_only=True)
class Convert(Command):
    """Write a data set in the other format, JSON lines or parquet, or several parquet files as one.

    The original's published files are read too. The columns written are memrl's own, with the text of each document.
    """

    input: Path = argument("input", type=Path, metavar="INPUT", help=_INPUT)
    out: Path
    """Data set to write, .jsonl or .parquet."""
    allow_files: bool = allow_files_flag()

    def run(self) -> None:
        from memrl.data import load_samples, write_samples
        from memrl.utils.files import fingerprint

        check_out(self.out, [self.input], (".jsonl", ".parquet"))
        samples = load_samples(self.input, self.allow_files)
        recipe = {"command": "convert", "input": fingerprint(samples.paths)}
        write_samples(self.out, samples.__getitem__, len(samples), recipe, "convert")
        print(f"{self.out}: {len(samples)} samples")


def evidence_depths(sample: "Sample") -> list[float]:
    """Where each piece of evidence begins, as a share of the document: from `depths`, or from the characters in `evidence`."""
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
