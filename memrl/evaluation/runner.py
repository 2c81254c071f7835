"""Runs methods on tasks: every reading a coroutine, all tasks, lengths and methods in one stream.

A document that fails for whatever reason is a wrong answer with the reason beside it. Leaving it out would make the table better
than the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from memrl.agents.memory import AgentConfig
from memrl.evaluation.document_cache import Documents, Place
from memrl.evaluation.measure import measure, unread
from memrl.evaluation.tasks import Length, Task
from memrl.utils.seeds import stable_id

if TYPE_CHECKING:
    from memrl.evaluation.methods import Method
    from memrl.llm import LocalLLM

Row = dict[str, Any]


class Key(NamedTuple):
    """One reading: which method reads which document the how-manieth time."""

    method: str
    task: str
    length: Length
    index: int
    repeat: int = 0

    @property
    def place(self) -> Place:
        return self.task, self.length, self.index


def row_key(row: Row) -> Key:
    return Key(*(row[name] for name in Key._fields))


def all_keys(
    tasks: Sequence[Task],
    lengths: Mapping[str, Sequence[Length]],
    num_samples: int | None,
    methods: Sequence[str],
    repeats: int = 1,
) -> list[Key]:
    """Every reading that is asked for, by task, length, index, method and repeat."""
    return [
        Key(method, task.name, length, index, repeat)
        for task in tasks
        for length in lengths[task.name]
        for index in range(task.count(length, num_samples))
        for method in methods
        for repeat in range(repeats)
    ]


def share_of(keys: Sequence[Key], tasks: Mapping[str, Task], rank: int = 0, world: int = 1) -> list[Key]:
    """What one of `world` processes reads, in its order; the ranks' shares together are the keys, each once.

    The longest documents come first, so that the batch is full to the end, and are dealt out like cards. All readings of a
    document stay together, on one rank: it is made and tokenised once.
    """
    places = sorted(dict.fromkeys(key.place for key in keys), key=lambda place: -tasks[place[0]].num_tokens(place[1]))
    mine = {place: order for order, place in enumerate(places[rank::world])}
    return sorted((key for key in keys if key.place in mine), key=lambda key: mine[key.place])


def read_all(
    llm: LocalLLM,
    keys: Sequence[Key],
    tasks: Mapping[str, Task],
    methods: Mapping[str, Method],
    seed: int,
    *,
    columns: Mapping[str, Any] | None = None,
    on_result: Callable[[Row], None] | None = None,
    on_turn: Callable[[str], None] | None = None,
) -> list[Row]:
    """Do the readings in the given order, as many at a time as the llm takes, and score the answers.

    A row is a function of the seed and its key, the method and the weights: neither what shares its batch nor the order of work
    nor an interruption changes it (up to the rounding of sums in another batch shape). `seconds` and `peak_gib` are measurements.

    Args:
        columns: stand in every row besides (model, chunk_tokens).
        on_result: called with each row as its reading ends.
        on_turn: called after each turn with its kind.

    Returns:
        The rows in the order of `keys`.
    """
    with Documents(tasks, seed, (key.place for key in keys)) as documents:

        async def read(key: Key) -> Row:
            identity = (seed, stable_id(*key))
            try:
                sample = await documents.get(key.place)
            except Exception as problem:
                found = unread(f"{key.task}-{key.length}-{key.index}", problem)
            else:
                found = await measure(llm, methods[key.method], sample, identity, on_turn)
            row = {**(columns or {}), **key._asdict(), **found}
            if on_result is not None:
                on_result(row)
            return row

        def stream() -> Iterator:
            for key in keys:
                yield read(key)

        return llm.run(stream(), concurrency=llm.concurrency)


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
    """Let the memory agent read one task's documents, each once: what training ends with.

    Args:
        num_samples: documents per length; None is the task's own choice.
        shard: (rank, world): this process takes its share; the ranks' rows together are all.
        done: keys that are not run again; their documents are not even made.
        on_result: called with each row as its document finishes.
        on_chunk: called after each chunk.

    Returns:
        The new rows, ordered by length and index.
    """
    from memrl.evaluation.methods import MethodOptions, make_methods

    methods = {method.name: method for method in make_methods(["memory"], MethodOptions(), agent, window=None)}
    tasks = {task.name: task}
    keys = share_of(all_keys([task], {task.name: lengths}, num_samples, list(methods)), tasks, *shard)

    def on_turn(kind: str) -> None:
        if on_chunk is not None and kind == "memory":
            on_chunk()

    left = [key for key in keys if key not in done]
    columns = {"model": "", "chunk_tokens": agent.chunk_tokens}
    rows = read_all(llm, left, tasks, methods, seed, columns=columns, on_result=on_result, on_turn=on_turn)
    return sorted(rows, key=lambda row: (lengths.index(row["length"]), row["index"]))
