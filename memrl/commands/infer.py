"""`memrl infer`: read files of any length and answer questions about them.

    memrl infer war_and_peace.txt -q "Who does Natasha marry?" --model DIR
    memrl infer a.txt b.txt -q "..." -q "..." --model DIR --json answers.json --trace trace.html

Every question is answered for every file; all are read together.
"""

import io
import json
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memrl.agents.limits import check_turn, longest_turn
from memrl.agents.memory import check_question, encode_document
from memrl.reading.open_model import ReaderOptions, check_reading, load_settings, open_llm
from memrl.reading.reader import Reading, chunk_pace, read_documents
from memrl.reading.text_files import read_text
from memrl.scoring.verify import last_boxed
from memrl.types import Sample
from memrl.utils.bounds import bounded
from memrl.utils.command_line import argument, check_out, parse_options, user_errors
from memrl.utils.devices import peak_memory
from memrl.utils.files import write_whole
from memrl.utils.progress import Progress, format_seconds

if TYPE_CHECKING:
    from memrl.llm import LocalLLM

UNKNOWN_SHARE = 0.2


@dataclass(kw_only=True)
class InferOptions:
    """What to read."""

    files: list[str] = argument("files", nargs="+", metavar="FILE", help="text file in UTF-8")
    question: list[str] = argument("-q", "--question", action="append", required=True, help="may be given several times")
    model: str
    """Hugging Face folder of the model."""
    json: Path | None = None
    """Write the answers to this JSON file too."""
    trace: Path | None = None
    """Write a web page that shows the memory after each chunk."""
    show_memory: bool = True
    """Print the memory below each answer; the answer was given from it alone."""
    seed: int = bounded(0, 0, 2**63 - 1)
    """Seed of the sampling; at temperature 0 nothing is random."""


def main(arguments: Sequence[str] | None = None, prog: str = "memrl infer") -> int:
    """The exit code: 0, 1 if a document could not be read to its end, 130 after Ctrl-C, 2 for mistakes."""
    options, reader = parse_options(
        (InferOptions, ReaderOptions),
        arguments,
        prog=prog,
        usage='FILE [FILE ...] -q "question" [-q ...] --model DIR [--json OUT] [--trace OUT] [...]',
        description="Read files of any length chunk by chunk and answer questions from the memory kept meanwhile. "
        "Every question is answered for every file; all are read together.",
    )
    samples: list[Sample] = []
    readings: dict[str, Reading] = {}
    try:
        with user_errors():
            samples = make_samples(options.files, options.question)
            for path in filter(None, (options.json, options.trace)):
                check_out(path)
            agent, tokenizer = load_settings(options.model, reader)
            longest_question = max(len(check_question(tokenizer.encode(sample.question), agent)) for sample in samples)
            llm = open_llm(options.model, tokenizer, agent, reader)
            sizes, warnings = measure(samples, llm)
            measured = {"document_tokens": max(sizes), "question_tokens": longest_question}
            check_reading(options.model, reader, tokenizer, agent, **measured)
            check_turn(llm.sampler, longest_turn(tokenizer, agent, **measured))
        print(*llm.about, *warnings, sep="\n", file=sys.stderr)
        total = sum(-(-size // agent.chunk_tokens) for size in sizes)
        began = time.monotonic()
        with Progress("read", total, "chunks") as progress:

            def on_progress(reading: Reading) -> None:
                readings[reading.sample.id] = reading
                show_progress(progress, readings.values(), len(samples), reading)

            read_documents(llm, samples, agent, on_progress, seed=options.seed)
    except KeyboardInterrupt:
        done = sum(reading.done for reading in readings.values())
        saved = f", saved in {options.json}" if options.json and done else ""
        print(f"interrupted: {done} of {len(options.files) * len(options.question)} answers{saved}", file=sys.stderr)
        return 130
    finally:  # also after Ctrl-C or a crash
        answered = [readings[sample.id] for sample in samples if sample.id in readings and readings[sample.id].done]
        written = not readings or write_outputs(answered, answered or list(readings.values()), options)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # print ? for letters that the terminal lacks
    for reading in answered:
        print_answer(reading, options.show_memory, len(options.files) > 1)
    print_summary(answered, time.monotonic() - began)
    return int(not written or any(reading.error is not None for reading in answered))


def make_samples(files: list[str], questions: list[str]) -> list[Sample]:
    """A sample for every file and question; ValueError for one that cannot be used."""
    if not all(question.strip() for question in questions):
        raise ValueError("the question is empty")
    texts = {file: read_text(file) for file in files}
    return [
        Sample(f"{file}: {question}", question.strip(), text, metadata={"file": file})
        for file, text in texts.items()
        for question in dict.fromkeys(questions)
    ]


def measure(samples: list[Sample], llm: "LocalLLM") -> tuple[list[int], list[str]]:
    """Document tokens of every sample, and warnings about files whose words are not in the vocabulary."""
    sizes, warnings = [], {}
    unknown_id = llm.tokenizer.hf.unk_token_id
    for sample in samples:
        ids, file = encode_document(llm.encode, sample), sample.metadata["file"]
        sizes.append(len(ids))
        if unknown_id is not None and ids and (share := ids.count(unknown_id) / len(ids)) > UNKNOWN_SHARE:
            advice = "expect no sensible answer; use a model with a general tokenizer"
            warnings[file] = f"warning: {file}: this model's vocabulary lacks {share:.0%} of the text; {advice}"
    return sizes, list(warnings.values())


def show_progress(progress: Progress, readings: Collection[Reading], num_answers: int, current: Reading) -> None:
    tokens, done = sum(reading.tokens_read for reading in readings), sum(reading.done for reading in readings)
    answers = {"answers": f"{done}/{num_answers}"} if num_answers > 1 else {}
    fields = {"tokens": f"{tokens:,}", "memory": f"{current.memory_tokens} tokens", **answers}
    progress.set(sum(reading.chunks_read for reading in readings), **fields)


def write_outputs(answered: list[Reading], traced: list[Reading], options: InferOptions) -> bool:
    """Write the files of --json and --trace; False if that failed, which does not keep the answers from being printed."""
    try:
        if options.json is not None:
            write_whole(options.json, json.dumps([to_record(one) for one in answered], indent=2, ensure_ascii=False) + "\n")
        if options.trace is not None:
            from memrl.report.trace_page import write_trace

            write_trace(options.trace, traced)
    except OSError as error:
        print(f"error: the answers could not be written: {error.strerror}", file=sys.stderr)
        return False
    return True


def to_record(reading: Reading) -> dict[str, Any]:
    return {
        "question": reading.sample.question,
        "answer": reading.answer,
        "response": reading.response,
        "memory": reading.memory,
        "chunks": reading.num_chunks,
        "tokens": reading.document_tokens,
        "seconds": round(reading.seconds, 3),
        "file": reading.sample.metadata["file"],
    } | ({} if reading.error is None else {"error": reading.error})


def print_answer(reading: Reading, show_memory: bool, show_file: bool) -> None:
    if show_file:
        print(f"file: {reading.sample.metadata['file']}")
    print(f"question: {reading.sample.question}")
    if reading.error is not None:
        print(f"failed: {printable(reading.error)}\n")
        return
    print(f"answer: {printable(reading.answer) or '(nothing)'}")
    if last_boxed(reading.response) is None:
        print("(the model put no answer into \\boxed{}, so this is its whole response)")
    if show_memory:
        print(f"memory ({reading.memory_tokens} tokens):")
        memory = printable(reading.memory).strip() or "(nothing)"
        print("\n".join(f"  {line}" for line in memory.splitlines()))
    print()


def printable(text: str) -> str:
    """Replace control characters and lone surrogates, so that no document can control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def print_summary(readings: list[Reading], seconds: float) -> None:
    chunks = sum(reading.chunks_read for reading in readings)
    tokens = sum(reading.document_tokens for reading in readings)
    pace = f"{chunks / max(seconds, 1e-9):.3g} chunks/s"
    parts = [f"{chunks:,} chunks, {tokens:,} tokens in {format_seconds(seconds)} ({pace})"]
    if ends := chunk_pace(readings):
        parts.append(f"seconds per chunk: first tenth {ends[0]:.3g}, last tenth {ends[1]:.3g}")
    if memory := peak_memory():
        parts.append(f"peak memory {memory}")
    print("; ".join(parts), file=sys.stderr)
