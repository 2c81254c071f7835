"""`memrl infer`: read files of any length and answer questions about them.

    memrl infer war_and_peace.txt -q "Who does Natasha marry?" --model DIR
    memrl infer a.txt b.txt -q "..." -q "..." --model DIR --json answers.json --trace trace.html

Every question is answered for every file; all are read together.
"""

import json
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memrl.agents.agent_config import check_question, encode_document
from memrl.agents.limits import check_turn, longest_turn
from memrl.reading.open_model import ReaderOptions, check_reading, load_settings, open_llm
from memrl.reading.reader import Reading, chunk_pace, read_documents
from memrl.reading.text_files import read_text
from memrl.scoring.verify import last_boxed
from memrl.types import Sample
from memrl.utils.bounds import bounded
from memrl.utils.command_line import argument, check_out, parse_options, user_errors
from memrl.utils.devices import peak_memory
from memrl.utils.files import PAGE_MARK, check_output, check_own_output, write_whole
from memrl.utils.plain_text import printable, reason_of
from memrl.utils.process import StopSignals
from memrl.utils.progress import Progress, format_seconds

if TYPE_CHECKING:
    from memrl.agents import AgentConfig
    from memrl.llm import LocalLLM

UNKNOWN_SHARE = 0.2
JSON_MARK = b'[\n  {\n    "question": '  # the beginning of what --json writes; no other file is replaced
LONGEST_LINE = 2000  # characters of a file's name or a question


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
    """The exit code: 0; 1 if a document could not be read to its end; 2 for mistakes; 130 after Ctrl-C, 143 after SIGTERM."""
    options, reader = parse_options(
        (InferOptions, ReaderOptions),
        arguments,
        prog=prog,
        usage='FILE [FILE ...] -q "question" [-q ...] --model DIR [--json OUT] [--trace OUT] [...]',
        description="Read files of any length chunk by chunk and answer questions from the memory kept meanwhile. "
        "Every question is answered for every file; all are read together. After Ctrl-C or SIGTERM the finished answers are "
        "printed, and --json and --trace have the memory of the others too.",
    )
    readings: dict[str, Reading] = {}
    written, stopped, began = True, 0, time.monotonic()
    with StopSignals() as stop:
        try:
            with user_errors():
                samples = make_samples(options.files, options.question)
                check_outputs(options, reader)
                llm, agent, sizes = open_model(options.model, reader, samples)
            total = sum(-(-size // agent.chunk_tokens) for size in sizes)
            began = time.monotonic()
            with Progress("read", total, "chunks", at_once=min(len(samples), llm.concurrency)) as progress:

                def on_progress(reading: Reading) -> None:
                    readings[reading.sample.id] = reading
                    show_progress(progress, readings.values(), len(samples), reading)

                read_documents(llm, samples, agent, on_progress, seed=options.seed)
        except KeyboardInterrupt:
            stop.end_at_next()
            stopped = 128 + stop.number
        finally:  # also after a crash
            ordered = sorted(readings.values(), key=order_of(options))
            finished = [reading for reading in ordered if reading.done]
            for reading in ordered:
                if not reading.done:
                    reading.error = f"interrupted after {reading.chunks_read} of {reading.num_chunks} chunks"
            written = not readings or write_outputs(ordered, options)
    for reading in finished:
        print_answer(reading, options.show_memory, len(options.files) > 1)
    if not stopped:
        print_summary(finished, time.monotonic() - began)
        return int(not written or any(reading.error is not None for reading in finished))
    saved = f", saved in {options.json}" if options.json and readings and written else ""
    print(f"interrupted: {len(finished)} of {len(options.files) * len(options.question)} answers{saved}", file=sys.stderr)
    return stopped


def order_of(options: InferOptions) -> Callable[[Reading], tuple[int, int]]:
    """The key that sorts readings as the command line names files and questions."""
    questions = [question.strip() for question in options.question]
    return lambda one: (options.files.index(one.sample.metadata["file"]), questions.index(one.sample.question))


def open_model(model: str, reader: ReaderOptions, samples: list[Sample]) -> "tuple[LocalLLM, AgentConfig, list[int]]":
    """The model, how it reads, and the documents' tokens; ValueError if it cannot read them, before the first chunk."""
    agent, tokenizer = load_settings(model, reader)
    longest_question = max(len(check_question(tokenizer.encode(sample.question), agent)) for sample in samples)
    llm = open_llm(model, tokenizer, agent, reader)
    sizes, warnings = measure(samples, llm)
    measured = {"document_tokens": max(sizes), "question_tokens": longest_question}
    check_reading(model, reader, tokenizer, agent, **measured)
    if (longest := longest_turn(tokenizer, agent, **measured)) is not None:
        check_turn(llm.sampler, longest)
    print(*llm.about, *warnings, sep="\n", file=sys.stderr)
    return llm, agent, sizes


def check_outputs(options: InferOptions, reader: ReaderOptions) -> None:
    """Raise ValueError if --json or --trace cannot be written, or would overwrite what is read, each other, standard output
    or a file of another kind.
    """
    prompts = [reader.agent.prompts] if reader.agent.prompts and Path(reader.agent.prompts).is_file() else []
    taken = [*map(Path, [*options.files, options.model, *prompts])]
    taken += [stream for stream in map(Path, ("/dev/stdout", "/dev/stderr")) if stream.is_file()]  # redirected into a file
    for path, mark in ((options.json, JSON_MARK), (options.trace, PAGE_MARK)):
        if path is None:
            continue
        check_out(path)
        check_output(path, taken)
        check_own_output(path, mark)
        if path.is_file() or not path.exists():  # a pipe or a terminal takes both
            taken.append(path)


def make_samples(files: list[str], questions: list[str]) -> list[Sample]:
    """A sample for every file and question; ValueError for one that cannot be used."""
    for question in questions:
        if not question.strip():
            raise ValueError("the question is empty")
        if not question.isascii() and not is_utf8(question):
            raise ValueError(f"the question {printable(question)!r} is not UTF-8 text; type it in a UTF-8 terminal")
    texts = {file: read_text(file) for file in files}
    return [
        Sample(f"{file}: {question}", question.strip(), text, metadata={"file": file})
        for file, text in texts.items()
        for question in dict.fromkeys(questions)
    ]


def is_utf8(text: str) -> bool:
    """Whether a word of the command line was UTF-8: Python stands other bytes as halves of surrogate pairs."""
    return text.encode("utf-8", "ignore").decode() == text


def measure(samples: list[Sample], llm: "LocalLLM") -> tuple[list[int], list[str]]:
    """Document tokens of every sample, and warnings about files whose words are not in the vocabulary."""
    sizes, warnings = [], {}
    unknown_id = llm.tokenizer.hf.unk_token_id
    for sample in samples:
        file = sample.metadata["file"]
        try:
            ids = encode_document(llm.encode, sample)
        except BaseException as error:
            reason_of(error)  # raises Ctrl-C again; else this reading alone fails, and says so
            ids = []
        sizes.append(len(ids))
        if unknown_id is not None and ids and (share := ids.count(unknown_id) / len(ids)) > UNKNOWN_SHARE:
            advice = "expect no sensible answer; use a model with a general tokenizer"
            warnings[file] = f"warning: {printable(file)}: this model's vocabulary lacks {share:.0%} of the text; {advice}"
    return sizes, list(warnings.values())


def show_progress(progress: Progress, readings: Collection[Reading], num_answers: int, current: Reading) -> None:
    tokens, done = sum(reading.tokens_read for reading in readings), sum(reading.done for reading in readings)
    answers = {"answers": f"{done}/{num_answers}"} if num_answers > 1 else {}
    fields = {"tokens": f"{tokens:,}", "memory": f"{current.memory_tokens} tokens", **answers}
    progress.set(sum(reading.chunks_read for reading in readings), **fields)


def write_outputs(readings: list[Reading], options: InferOptions) -> bool:
    """Write the files of --json and --trace; False if that failed, which does not keep the answers from being printed."""
    try:
        if options.json is not None:
            write_whole(options.json, json.dumps([to_record(one) for one in readings], indent=2, ensure_ascii=False) + "\n")
        if options.trace is not None:
            from memrl.report.trace_page import write_trace

            write_trace(options.trace, readings)
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
        print(f"file: {printable(reading.sample.metadata['file'], LONGEST_LINE)}")
    print(f"question: {printable(reading.sample.question, LONGEST_LINE)}")
    if reading.error is not None:
        print(f"failed: {reading.error}\n")
        return
    print(f"answer: {printable_lines(reading.answer) or '(nothing)'}")
    if last_boxed(reading.response) is None:
        print("(the model put no answer into \\boxed{}, so this is its whole response)")
    if show_memory:
        print(f"memory ({reading.memory_tokens} tokens):")
        memory = printable_lines(reading.memory).strip() or "(nothing)"
        print("\n".join(f"  {line}" for line in memory.splitlines()))
    print()


def printable_lines(text: str) -> str:
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
