"""Runs an agent on a task: every document a coroutine, all lengths in one stream.

A document that fails for whatever reason is a wrong answer with the reason beside it. Leaving it out would
make the table better than the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from memrl.agents.memory import AgentConfig
from memrl.evaluation.tasks import Length, Task
from memrl.reading import Reading, read_document, stable_id
from memrl.verify import lenient_match, strict_match, token_f1

if TYPE_CHECKING:
    from memrl.llm import LocalLLM

Row = dict[str, Any]
Key = tuple[str, Length, int]


def evaluate(
    llm: LocalLLM,
    task: Task,
    lengths: Sequence[Length],
    num_samples: int | None,
    agent: AgentConfig,
    seed: int,
    *,
    shard: tuple[int, int] = (0, 1),
    done: Collection[Key] = frozenset(),
    on_result: Callable[[Row], None] | None = None,
    on_chunk: Callable[[], None] | None = None,
) -> list[Row]:
    """Read the task's documents and score the answers.

    A row is a function of (seed, task, length, index), the agent and the weights: neither what shares its
    batch nor the order of work nor an interruption changes it (up to the rounding of sums in another batch
    shape).

    Args:
        lengths: in rising order. The longest documents are read first, so that the batch is full to the end.
        num_samples: documents per length; None is the task's own choice.
        shard: (rank, world): this process takes every world-th document; the ranks' rows together are all.
        done: keys as of `row_key` that are not run again; their documents are not even made.
        on_result: called with each row as its document finishes.
        on_chunk: called after each chunk.

    Returns:
        The new rows, ordered by length and index. A row has the keys task, length, index, id, question,
        answers, response, answer (the last box, else the whole response), memory, strict, lenient, f1
        (floats), chunks, tokens (of the document) and error (None, or why there is no answer).
    """
    rank, world = shard
    mine = [key for key in sample_keys(task, lengths, num_samples)[rank::world] if key not in done]

    async def run(key: Key) -> Row:
        row = await _run_one(llm, task, key, agent, seed, on_chunk)
        if on_result is not None:
            on_result(row)
        return row

    def stream() -> Iterator:
        for key in reversed(mine):
            yield run(key)

    return llm.run(stream(), concurrency=llm.sampler.max_rows)[::-1]


def sample_keys(task: Task, lengths: Sequence[Length], num_samples: int | None) -> list[Key]:
    """All that `evaluate` runs, ordered by length and index."""
    return [(task.name, length, index) for length in lengths for index in range(task.count(length, num_samples))]


def row_key(row: Row) -> Key:
    return row["task"], row["length"], row["index"]


async def _run_one(
    llm: LocalLLM, task: Task, key: Key, agent: AgentConfig, seed: int, on_chunk: Callable[[], None] | None
) -> Row:
    name, length, index = key
    sample = task.sample(length, index, seed)
    reported = 0

    def on_progress(reading: Reading) -> None:
        nonlocal reported
        if on_chunk is not None and reading.chunks_read > reported:
            reported = reading.chunks_read
            on_chunk()

    reading = await read_document(llm, sample, agent, (seed, stable_id(*key)), on_progress, keep_steps=False)
    failed = reading.error is not None
    scores = {"strict": strict_match, "lenient": lenient_match, "f1": token_f1}
    return {
        "task": name,
        "length": length,
        "index": index,
        "id": sample.id,
        "question": sample.question,
        "answers": list(sample.answers),
        "response": reading.response,
        "answer": reading.answer,
        "memory": reading.memory,
        **{score: 0.0 if failed else score_of(reading.response, sample.answers) for score, score_of in scores.items()},
        "chunks": reading.chunks_read,
        "tokens": reading.document_tokens,
        "error": reading.error,
    }
