"""Read files of any length and answer questions about them.

    python infer.py war_and_peace.txt -q "Who does Natasha marry?" --model DIR
    python infer.py a.txt b.txt -q "..." -q "..." --model DIR --json answers.json --trace trace.html

Every question is asked of every file, and all are read together.
"""

import io
import json
import os
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from memrl.agents.limits import check_turn, longest_turn
from memrl.reading.open_model import ReaderOptions, check_seed, load_settings, open_llm
from memrl.reading.reader import Reading, chunk_pace, read_documents
from memrl.reading.text_files import read_text
from memrl.scoring.verify import last_boxed
from memrl.types import Sample
from memrl.utils.command_line import Parser, user_errors
from memrl.utils.devices import peak_memory
from memrl.utils.files import write_whole
from memrl.utils.progress import Progress, format_seconds

if TYPE_CHECKING:
    from memrl.llm import LocalLLM

UNKNOWN_SHARE = 0.2


@dataclass
class InferOptions:
    """What is read."""

    model: str
    """Hugging Face folder of the model."""
    json: str | None = None
    """Write the answers to this JSON file too."""
    trace: str | None = None
    """Write a web page that shows the memory after each chunk."""
    show_memory: bool = True
    """Print the memory below each answer: it is all that the answer was given from."""
    seed: int = 0
    """All randomness of sampling; greedy reading has none."""


def parse(arguments: list[str] | None) -> tuple[list[str], list[str], InferOptions, ReaderOptions]:
    parser = Parser(
        prog="infer.py",
        usage='infer.py FILE [FILE ...] -q "question" [-q ...] --model DIR [--json OUT] [--trace OUT] [...]',
        description="Read files of any length chunk by chunk, and answer questions from what was remembered. "
        "Every question is asked of every file; all are read together.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="UTF-8 text")
    parser.add_argument("-q", "--question", action="append", required=True, help="may be given several times")
    parser.add_class_arguments(InferOptions)
    parser.add_class_arguments(ReaderOptions)
    settings = parser.instantiate(parser.parse_args(arguments)).as_dict()
    split = [{f.name: settings[f.name] for f in fields(kind)} for kind in (InferOptions, ReaderOptions)]
    return settings["files"], settings["question"], InferOptions(**split[0]), ReaderOptions(**split[1])


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, 1 if a document could not be read to its end, 130 after Ctrl-C, 2 for mistakes."""
    files, questions, options, reader = parse(arguments)
    readings: list[Reading] = []
    written = True
    try:
        with user_errors():
            check_seed(options.seed)
            samples = make_samples(files, questions)
            for path in (options.json, options.trace):
                check_output(path)
            agent, tokenizer = load_settings(options.model, reader)
            longest_question = check_questions(questions, tokenizer, agent)
            llm = open_llm(options.model, tokenizer, agent, reader)
            sizes, unknown = measure(samples, llm)
            longest = {"document_tokens": max(sizes), "question_tokens": longest_question}
            check_turn(llm.sampler, longest_turn(tokenizer, agent, **longest))
        print(*llm.about, sep="\n", file=sys.stderr)
        warn_of_unknown(unknown)
        total = sum(-(-size // agent.chunk_tokens) for size in sizes)
        began = time.monotonic()
        with Progress("read", total, "chunks") as progress:
            read_documents(llm, samples, agent, Watcher(progress, readings, len(samples)), seed=options.seed)
    except KeyboardInterrupt:
        done = sum(reading.done for reading in readings)
        saved = f", saved in {options.json}" if options.json and done else ""
        print(f"interrupted: {done} of {len(files) * len(questions)} answers{saved}", file=sys.stderr)
        return 130
    finally:
        if readings:
            written = write_outputs(readings, samples, options)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a letter is no reason to fail now
    for reading in in_order(readings, samples):
        print_answer(reading, options.show_memory, len(files) > 1)
    print_summary(readings, time.monotonic() - began)
    return int(not written or any(reading.error is not None for reading in readings))


def make_samples(files: list[str], questions: list[str]) -> list[Sample]:
    """Every question on every file; ValueError for a file or question that cannot be used."""
    if not all(question.strip() for question in questions):
        raise ValueError("the question is empty")
    texts = {file: read_text(file) for file in files}
    return [
        Sample(f"{file}: {question}", question.strip(), text, metadata={"file": file})
        for file, text in texts.items()
        for question in dict.fromkeys(questions)
    ]


def check_output(path: str | None) -> None:
    """Now, and not after an hour of reading."""
    if path is None:
        return
    if Path(path).is_dir() or not os.access(Path(path).resolve().parent, os.W_OK):
        raise ValueError(f"{path} cannot be written; give the name of a file in a folder that exists")


def check_questions(questions: list[str], tokenizer, agent) -> int:
    """Tokens of the longest question; ValueError if one is too long."""
    from memrl.agents.memory import check_question

    return max(len(check_question(tokenizer.encode(question.strip()), agent)) for question in questions)


def measure(samples: list[Sample], llm: "LocalLLM") -> tuple[list[int], dict[str, float]]:
    """Document tokens of every sample; by file, the share of them that the vocabulary does not know."""
    sizes, unknown = [], {}
    unknown_id = llm.tokenizer.hf.unk_token_id
    for sample in samples:
        ids = llm.encode(sample.context)
        sizes.append(len(ids))
        if unknown_id is not None and ids:
            unknown[sample.metadata["file"]] = ids.count(unknown_id) / len(ids)
    return sizes, unknown


def warn_of_unknown(unknown: dict[str, float]) -> None:
    """About documents that a closed vocabulary does not cover."""
    for file, share in unknown.items():
        if share > UNKNOWN_SHARE:
            print(
                f"warning: {file}: this model's vocabulary lacks {share:.0%} of the text, so expect no "
                "sensible answer; use a model with a general tokenizer",
                file=sys.stderr,
            )


class Watcher:
    """Shows the progress of all readings together, and collects them."""

    def __init__(self, progress: Progress, readings: list[Reading], num_answers: int):
        self.progress, self.readings, self.num_answers = progress, readings, num_answers
        self._seen: dict[str, tuple[int, int]] = {}
        self._tokens = self._done = 0

    def __call__(self, reading: Reading) -> None:
        chunks, tokens = self._seen.get(reading.sample.id, (0, 0))
        if reading.sample.id not in self._seen:
            self.readings.append(reading)
        self._seen[reading.sample.id] = (reading.chunks_read, reading.tokens_read)
        self._tokens += reading.tokens_read - tokens
        self._done += reading.done
        answers = {"answers": f"{self._done}/{self.num_answers}"} if self.num_answers > 1 else {}
        fields = {"tokens": f"{self._tokens:,}", "memory": f"{reading.memory_tokens} tokens", **answers}
        self.progress.advance(reading.chunks_read - chunks, **fields)


def in_order(readings: list[Reading], samples: list[Sample]) -> list[Reading]:
    """The finished readings in the order of the command line."""
    order = {sample.id: place for place, sample in enumerate(samples)}
    return sorted((r for r in readings if r.done), key=lambda reading: order[reading.sample.id])


def write_outputs(readings: list[Reading], samples: list[Sample], options: InferOptions) -> bool:
    """Write what is finished, also after Ctrl-C or a crash; whether that worked. The answers are printed either way."""
    finished = in_order(readings, samples)
    try:
        if options.json is not None:
            write_whole(options.json, json.dumps(to_records(finished), indent=2, ensure_ascii=False) + "\n")
        if options.trace is not None:
            from memrl.report.trace_command import write_trace

            write_trace(options.trace, finished or readings)
    except OSError as error:
        print(f"error: the answers could not be written: {error.strerror}", file=sys.stderr)
        return False
    return True


def to_records(finished: list[Reading]) -> list[dict]:
    return [
        {
            "question": reading.sample.question,
            "answer": reading.answer,
            "response": reading.response,
            "memory": reading.memory,
            "chunks": reading.num_chunks,
            "tokens": reading.document_tokens,
            "seconds": round(reading.seconds, 3),
            "file": reading.sample.metadata["file"],
            **({"error": reading.error} if reading.error is not None else {}),
        }
        for reading in finished
    ]


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
    """Without control characters and half surrogates: a document must not be able to steer the terminal."""
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


if __name__ == "__main__":
    sys.exit(main())
