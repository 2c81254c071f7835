"""A reading, or a training run's rollouts, as a web page: the memory after each chunk and what changed in it.

memrl infer book.txt -q "..." --model DIR --trace reading.html
memrl trace runs/tiny/rollouts.jsonl --out rollouts.html --step 40
"""

from collections.abc import Iterable
from html import escape
from pathlib import Path

from memrl.reading.reader import Reading, Step
from memrl.report.html import changes, memory_card, page
from memrl.report.rollout_page import LAST, read_rollouts, rollouts_page
from memrl.utils.files import write_whole
from memrl.utils.progress import format_seconds

__all__ = ["changes", "write_rollouts", "write_trace"]


def write_trace(path: str | Path, readings: Iterable[Reading]) -> None:
    """Write a page of readings, whole or not at all."""
    readings = list(readings)
    parts = [
        "<h1>What was remembered</h1>",
        '<p class="soft">Each card is the memory after one chunk; <ins>green</ins> came in with the chunk, '
        "<del>red</del> was dropped. The answer was given from the last memory alone.</p>",
        *(_reading(reading) for reading in readings),
    ]
    write_whole(path, page(f"memrl: {len(readings)} reading{'s' * (len(readings) != 1)}", parts))


def write_rollouts(path: str | Path, rollouts: str | Path, step: int | None = None, last: int = LAST) -> int:
    """Write a page of the last trajectories of a rollouts.jsonl, whole or not at all; returns how many it shows.

    Args:
        step: only those of this step.

    Raises:
        ValueError: see `memrl.report.rollout_page.read_rollouts`.
    """
    records = read_rollouts(rollouts, step, last)
    run = Path(rollouts).resolve().parent.name
    steps = sorted({record["step"] for record in records})
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    write_whole(path, rollouts_page(records, f"Rollouts of {run}, {span}"))
    return len(records)


def _reading(reading: Reading) -> str:
    size = f"{reading.document_tokens:,} tokens in {reading.num_chunks:,} chunks"
    source = escape(str(reading.sample.metadata.get("file", reading.sample.id)))
    parts = [
        f"<h2>{escape(reading.sample.question)}</h2>",
        f'<p class="soft">{source}: {size}, {format_seconds(reading.seconds)}</p>',
    ]
    if reading.sample.answers:
        gold = " | ".join(escape(answer) for answer in reading.sample.answers)
        parts.append(f"<p>Gold answer{'s' * (len(reading.sample.answers) > 1)}: <mark>{gold}</mark></p>")
    if reading.error is not None:
        parts.append(f'<div class="card answer error">{escape(reading.error)}</div>')
    elif reading.done:
        answer = escape(reading.answer)
        parts.append(f'<div class="card answer"><b>Answer</b><div class="text">{answer}</div></div>')
    memory, chunk = "", 0
    for step in reading.steps:
        if step.kind == "memory":
            parts.append(_chunk(reading, step, chunk, memory))
            memory, chunk = step.text, chunk + 1
        else:
            text = f'<div class="text">{escape(step.text)}</div>'
            parts.append(f'<div class="card"><b>Answer turn</b> {_facts(step)}{text}</div>')
    return "\n".join(parts)


def _chunk(reading: Reading, step: Step, chunk: int, memory: str) -> str:
    first = chunk * reading.chunk_tokens
    last = min(first + reading.chunk_tokens, reading.document_tokens)
    where = f'<span class="soft">, document tokens {first:,} to {last:,}</span>'
    return memory_card(f"<b>Chunk {chunk + 1} of {reading.num_chunks}</b> {_facts(step)}{where}", memory, step.text)


def _facts(step: Step) -> str:
    ended = "" if step.finish_reason == "stop" else ' <span class="cut">cut off by the token cap</span>'
    return f'<span class="soft">{step.tokens} response tokens, {step.finish_reason}</span>{ended}'
