"""Run methods on tasks: every reading is a coroutine, and all tasks, lengths and methods share one stream.

A document that fails for whatever reason is a wrong answer, and its row holds the reason. Without these rows the table would look
better than the model is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

from memrl.agents.memory import AgentConfig
from memrl.evaluation.methods import Method
from memrl.evaluation.reading_row import new_row, one_line, read_to_row
from memrl.evaluation.tasks import Length, Task
from memrl.types import Sample
from memrl.utils.seeds import stable_id

if TYPE_CHECKING:
    from memrl.llm import LLM

Row = dict[str, Any]


@dataclass(frozen=True, order=True)
class Key:
    """One reading: method, document (task, length and index), repeat index."""

    method: str
    task: str
    length: Length
    index: int
    repeat: int = 0

    @property
    def document(self) -> tuple[str, Length, int]:
        return self.task, self.length, self.index


def row_key(row: Row) -> Key:
    return Key(*(row[field.name] for field in fields(Key)))


def all_keys(
    tasks: Sequence[Task],
    lengths: Mapping[str, Sequence[Length]],
    num_samples: int | None,
    methods: Sequence[str],
    repeats: int = 1,
) -> list[Key]:
    """Every requested reading, by task, length, index, method and repeat."""
    return [
        Key(method, task.name, length, index, repeat)
        for task in tasks
        for length in lengths[task.name]
        for index in range(task.count(length, num_samples))
        for method in methods
        for repeat in range(repeats)
    ]


def share_of(keys: Sequence[Key], tasks: Mapping[str, Task], rank: int = 0, world: int = 1) -> list[Key]:
    """The readings of one of `world` processes, in order of work; together the ranks' shares hold each key once.

    The longest documents come first, so that the batch stays full to the end, and are distributed in turn. All readings of a
    document are consecutive on one rank: it is made and tokenised once.
    """
    documents = sorted(dict.fromkeys(key.document for key in keys), key=lambda item: -tasks[item[0]].num_tokens(item[1]))
    order = {document: number for number, document in enumerate(documents[rank::world])}
    return sorted((key for key in keys if key.document in order), key=lambda key: order[key.document])


async def make_document(task: Task, key: Key, seed: int, thread: ThreadPoolExecutor) -> Sample:
    """A document: a function of its task, length, index and seed.

    A slow document is made in a thread, so that the sampler's steps go on meanwhile. All share one thread: then generators need
    not be thread-safe, but they must not share a tokenizer with the sampler's thread. A quick document is made at once, so that
    the same readings share a batch every time.
    """
    if task.is_slow:
        return await asyncio.get_running_loop().run_in_executor(thread, task.sample, key.length, key.index, seed)
    return task.sample(key.length, key.index, seed)


def read_all(
    llm: LLM,
    keys: Sequence[Key],
    tasks: Mapping[str, Task],
    methods: Mapping[str, Method],
    seed: int,
    *,
    columns: Mapping[str, Any] | None = None,
    on_result: Callable[[Row], None] | None = None,
    on_turn: Callable[[str], None] | None = None,
) -> list[Row]:
    """Do the readings in the given order, `llm.concurrency` at a time, and score the answers.

    A row is a function of the seed and its key, the method and the weights. It does not depend on the other readings of its
    batch, the order of work or an interruption (up to the rounding of sums in another batch shape). `seconds` and `peak_gib` are
    measurements.

    Args:
        keys: the readings of a document are consecutive; else it is made more than once.
        columns: further columns of every row (model, chunk_tokens).
        on_result: called with each row as its reading ends.
        on_turn: called after each turn with its kind.

    Returns:
        The rows in the order of `keys`.
    """

    async def read(key: Key, document: asyncio.Task[Sample]) -> Row:
        try:
            sample = await document
        except Exception as problem:  # raised for each of its readings
            found = new_row(Sample(f"{key.task}-{key.length}-{key.index}", "", "")) | {"error": one_line(problem)}
        else:
            found = await read_to_row(llm, methods[key.method], sample, (seed, stable_id(*astuple(key))), on_turn)
        row = {**(columns or {}), **asdict(key), **found}
        if on_result is not None:
            on_result(row)
        return row

    def stream() -> Iterator:
        for _, readings in groupby(keys, key=lambda key: key.document):
            document = None
            for key in readings:  # made when its first reading starts, once for all its readings
                document = document or asyncio.ensure_future(make_document(tasks[key.task], key, seed, thread))
                yield read(key, document)

    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="documents")
    try:
        return llm.run(stream(), concurrency=llm.concurrency)
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def evaluate(
    llm: LLM,
    task: Task,
    lengths: Sequence[Length],
    num_samples: int | None,
    agent: AgentConfig,
    seed: int,
    *,
    shard: tuple[int, int] = (0, 1),
    on_result: Callable[[Row], None] | None = None,
    on_chunk: Callable[[], None] | None = None,
) -> list[Row]:
    """Read one task's documents once each with the memory agent, as at the end of training.

    Args:
        num_samples: documents per length; None is the task's default.
        shard: (rank, world): the part of this process; the rows of all ranks together are complete.
        on_result: called with each row as its document finishes.
        on_chunk: called after each chunk.

    Returns:
        The rows, ordered by length and index.
    """
    method, tasks = Method("memory", agent), {task.name: task}
    keys = share_of(all_keys([task], {task.name: lengths}, num_samples, [method.name]), tasks, *shard)

    def on_turn(kind: str) -> None:
        if on_chunk is not None and kind == "memory":
            on_chunk()

    columns = {"model": "", "chunk_tokens": agent.chunk_tokens}
    rows = read_all(llm, keys, tasks, {method.name: method}, seed, columns=columns, on_result=on_result, on_turn=on_turn)
    return sorted(rows, key=lambda row: (lengths.index(row["length"]), row["index"]))
