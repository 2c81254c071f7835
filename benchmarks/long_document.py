"""Reading a long file: does the time of a chunk grow with its number, does memory stay flat?

    python benchmarks/long_document.py FILE --tokenizer DIR [--hidden 128] [--chunk_tokens 5000]
    python benchmarks/long_document.py --tiny runs/tiny/model [--chunks 4096 | --tokens 1000000]

The first reads a text file with a real tokenizer and random weights, the second a document of the miniature's own.
Prints seconds per chunk and resident memory for every tenth of the document.
"""

import argparse
import itertools
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from memrl.agents import AgentConfig
from memrl.data.needle import NAMES, draw_values, make_sample
from memrl.model import TransformerConfig, save_model
from memrl.model.loader import from_scratch
from memrl.prompts import load_prompts
from memrl.reading.open_model import ReaderOptions, load_settings, open_llm
from memrl.reading.reader import Reading, read_documents
from memrl.reading.text_files import read_text
from memrl.scoring.verify import strict_match
from memrl.tokenizer import load_tokenizer
from memrl.types import Sample


def resident_mib() -> float:
    """Now where the system tells, else the most so far."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def early_seed(num_chunks: int) -> int:
    """The first seed whose document has its needle within the first hundredth.

    The memory is longer once the needle is in it, so a late one makes later chunks more work; this way all tenths do the same.
    """
    for seed in itertools.count():
        rng = random.Random(seed)
        rng.choice(NAMES)
        draw_values(rng)
        if rng.randrange(num_chunks) <= num_chunks // 100:
            return seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="a text file")
    parser.add_argument("--tokenizer", type=Path, help="folder of a real tokenizer")
    parser.add_argument("--question", default="Who is the main character?")
    parser.add_argument("--hidden", type=int, default=128, help="width of the random Qwen2.5")
    parser.add_argument("--chunk_tokens", type=int, default=5000)
    parser.add_argument("--memory_tokens", type=int, default=64)
    parser.add_argument("--tiny", type=Path, help="model folder of a miniature run")
    parser.add_argument("--chunks", type=int, default=4096)
    parser.add_argument("--tokens", type=int, help="instead of --chunks: the number of tokens of the document")
    arguments = parser.parse_args()
    options = ReaderOptions()
    if arguments.tiny:
        agent, tokenizer = load_settings(arguments.tiny, options)
        llm = open_llm(arguments.tiny, tokenizer, agent, options)
        chunks = arguments.chunks if arguments.tokens is None else -(-arguments.tokens // agent.chunk_tokens)
        sample = make_sample(chunks, early_seed(chunks))
    elif arguments.file and arguments.tokenizer:
        tokenizer = load_tokenizer(arguments.tokenizer)
        size = arguments.hidden
        config = TransformerConfig(151_936, size, 2 * size, 4, 4, 2, size // 4, tie_word_embeddings=True)
        agent = AgentConfig(load_prompts("question_first"), arguments.chunk_tokens, arguments.memory_tokens, 32)
        with tempfile.TemporaryDirectory() as folder:
            save_model(from_scratch(config, seed=0), Path(folder) / "model", tokenizer=tokenizer)
            llm = open_llm(Path(folder) / "model", tokenizer, agent, options)
        sample = Sample(arguments.file.name, arguments.question, read_text(arguments.file))
    else:
        parser.error("give FILE and --tokenizer, or --tiny")

    marks: list[tuple[int, float, float]] = []

    def on_progress(reading: Reading) -> None:
        if not marks or reading.chunks_read * 10 // reading.num_chunks > marks[-1][0] * 10 // reading.num_chunks:
            marks.append((reading.chunks_read, time.perf_counter(), resident_mib()))

    [reading] = read_documents(llm, [sample], agent, on_progress)
    print(f"{reading.document_tokens:,} tokens, {reading.num_chunks} chunks, {reading.seconds:.1f} s")
    print("| up to chunk | ms per chunk | resident MiB |\n| --- | --- | --- |")
    for (before, then, _), (chunk, now, mib) in itertools.pairwise(marks):
        print(f"| {chunk} | {1000 * (now - then) / (chunk - before):.1f} | {mib:.0f} |")
    (_, start, _), (_, after_first, _), *_, (_, before_last, _), (_, end, _) = marks
    tenths = (marks[1][0] - marks[0][0]) / (after_first - start), (marks[-1][0] - marks[-2][0]) / (end - before_last)
    print(f"the last tenth's chunks take {tenths[0] / tenths[1] - 1:+.1%} of time beside the first's; median of all: ", end="")
    paces = [(now - then) / (chunk - before) for (before, then, _), (chunk, now, _) in itertools.pairwise(marks)]
    print(f"{1000 * statistics.median(paces):.2f} ms")
    print(f"answer: {reading.answer!r}" + (f", gold {sample.answers}" if sample.answers else ""))
    if sample.answers:
        print("right" if strict_match(reading.response, sample.answers) else "wrong")


if __name__ == "__main__":
    main()
