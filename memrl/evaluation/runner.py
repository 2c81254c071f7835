"""Run methods on tasks and make a row of each reading: the answer, its scores, its costs, and the evidence that the memory kept.

Every reading is a coroutine, and all tasks, lengths and methods share one stream.

A document that fails for whatever reason is a wrong answer, and its row holds the reason. Without these rows the table would look
better than the model is.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

from memrl.agents.agent_config import AgentConfig
from memrl.evaluation.methods import Method
from memrl.evaluation.tasks import Length, Task
from memrl.scoring.evidence import find_answers, is_traceable
from memrl.scoring.scores import score_response
from memrl.scoring.verify import extract_answer
from memrl.types import Sample, Trajectory, Turn
from memrl.utils.devices import peak_gib
from memrl.utils.plain_text import printable, reason_of
from memrl.utils.seeds import stable_id

if TYPE_CHECKING:
    from memrl.llm import LLM

Row = dict[str, Any]
VARIED = ("order", "gap", "needed")
MOST_READINGS = 2_000_000  # listed in memory; RULER's own 13 tasks x 6 lengths x 500 samples are 39,000
RETAINED_STEPS = 9  # shares of the gold answers are written as digits from 0 to 9


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
    methods: Iterable[str],
    repeats: int = 1,
) -> list[Key]:
    """Every requested reading, by task, length, index, method and repeat; ValueError for more than `MOST_READINGS`."""
    methods = list(methods)
    documents = sum(task.count(length, num_samples) for task in tasks for length in lengths[task.name])
    if (number := documents * len(methods) * repeats) > MOST_READINGS:
        raise ValueError(
            f"samples, repeats, lengths and methods make {printable(str(number), 30)} readings; at most {MOST_READINGS:,} are "
            "possible, so lower --samples"
        )
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
        keys: the readings of a document are consecutive; else it is made more than once. The rows have the same order.
        columns: further columns of every row (model, chunk_tokens).
        on_result: called with each row as its reading ends.
        on_turn: called after each turn with its kind.
    """

    async def read(key: Key, document: asyncio.Task[Sample]) -> Row:
        try:
            sample = await document
        except BaseException as problem:  # raised for each of its readings
            found = new_row(Sample(f"{key.task}-{key.length}-{key.index}", "", "")) | {"error": reason_of(problem)}
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
                if document is None:
                    document = asyncio.ensure_future(make_document(tasks[key.task], key, seed, thread))
                    # Its readings raise its error. Ctrl-C ends them first, and asyncio would print an error that nothing took.
                    document.add_done_callback(lambda task: task.cancelled() or task.exception())
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
        shard: (rank, world): the part of this process; the rows of all ranks together are complete.

    Returns:
        The rows, ordered by length and index.
    """
    method, tasks = Method("memory", agent), {task.name: task}
    keys = share_of(all_keys([task], {task.name: lengths}, num_samples, [method.name]), tasks, *shard)

    def on_turn(kind: str) -> None:
        if on_chunk is not None and kind == "memory":
            on_chunk()

    columns = {"model": "", "chunk_tokens": agent.chunk_tokens}
    rows = read_all(llm, keys, tasks, {"memory": method}, seed, columns=columns, on_result=on_result, on_turn=on_turn)
    return sorted(rows, key=lambda row: (lengths.index(row["length"]), row["index"]))


def new_row(sample: Sample) -> Row:
    """The columns of a row that depend on the reading, before it begins.

    memory: the last memory.
    chunks: turns after which the agent told its memory; of the memory agent one per chunk.
    turns: number of turns by kind.
    numbers: the agent's own scores of the trajectory.
    tokens, cut_tokens: of the document; those of them that the method did not show.
    prompt_tokens, response_tokens: of all turns.
    seconds: wall-clock time, during which the sampler also worked on other readings.
    peak_gib: peak memory of this process so far: of the GPU if one is used, None if the model runs elsewhere.
    held: one digit per told memory, see `retained_digit`; "" if no gold answer can be traced.
    variation: of the bench's documents alone: `order` and `gap` of two facts, `needed` facts.
    """
    return {
        "id": sample.id,
        "question": sample.question,
        "answers": list(sample.answers),
        "match": sample.match,
        "response": "",
        "answer": "",
        "memory": "",
        **score_response("", sample.answers, sample.match),
        **dict.fromkeys(("chunks", "tokens", "cut_tokens", "prompt_tokens", "response_tokens"), 0),
        "turns": {},
        "numbers": {},
        "seconds": 0.0,
        "peak_gib": None,
        "depths": depths_of(sample),
        "held": "",
        "error": None,
        **variation_of(sample),
    }


def add_turn(row: Row, turn: Turn) -> None:
    """Count a turn in the row.

    Raises:
        ValueError: a token's probability is not a number, so its choice says nothing about the model.
    """
    if not all(map(math.isfinite, turn.response_logprobs)):
        raise ValueError("outputs of the model are NaN or infinite: its weights are damaged, or too large for the dtype")
    row["prompt_tokens"] += len(turn.prompt_ids)
    row["response_tokens"] += len(turn.response_ids)
    row["turns"][turn.kind] = row["turns"].get(turn.kind, 0) + 1
    turn.response_logprobs = []


def add_memory(row: Row, sample: Sample, turn: Turn) -> None:
    """Note the memory after a turn, and free the turn's prompt, which only training needs: those of a long document take much
    memory, and a turn that ended in a memory begins no conversation that goes on."""
    memory = turn.memory or ""
    row["chunks"] += 1
    row["memory"] = memory
    row["held"] += retained_digit(memory, sample.answers, sample.match)
    turn.prompt_ids = []


def retained_digit(memory: str, answers: Sequence[str], match: str) -> str:
    """floor(9 s), where s is the share of the gold answers that occur word for word in the memory; for "any" only 0 or 9.

    Answers that occur in any text (yes, no) do not count; "" if there are no others.

    >>> retained_digit("red fox, owl", ["red fox", "blue hen"], "all"), retained_digit("a red fox", ["red fox", "owl"], "any")
    ('4', '9')
    """
    traced = [answer for answer in answers if is_traceable(answer)]
    if not traced:
        return ""
    if match == "any":
        return str(RETAINED_STEPS * bool(find_answers(memory, traced)))
    retained = sum(bool(find_answers(memory, [answer])) for answer in traced)
    return str(RETAINED_STEPS * retained // len(traced))


async def read_to_row(
    llm: LLM, method: Method, sample: Sample, identity: Sequence[int], on_turn: Callable[[str], None] | None = None
) -> Row:
    """Run the method on the sample; returns `new_row`'s columns.

    An exception becomes the row's `error`, and the other readings go on. A failure has no response, and all scores of an empty
    answer are 0.

    Args:
        identity: everything that the reading's randomness depends on.
        on_turn: called after each turn with its kind.
    """
    row = new_row(sample)

    def record(turn: Turn) -> None:
        add_turn(row, turn)
        if on_turn is not None:
            on_turn(turn.kind)

    session = llm.session(*identity, on_turn=record, on_memory=lambda turn, _: add_memory(row, sample, turn))
    began = time.perf_counter()
    try:
        row["tokens"] = len(session.encode(sample.context)) if sample.context.strip() else 0
        trajectory = await method.run(session, sample)
    except BaseException as problem:
        row["error"], trajectory = reason_of(problem), Trajectory(memory=row["memory"])
    row["seconds"] = round(time.perf_counter() - began, 3)
    row["peak_gib"] = peak_gib() if hasattr(llm, "sampler") else None
    row["cut_tokens"] = int(trajectory.scores.get("cut_tokens", 0))
    row["numbers"] = {name: float(value) for name, value in trajectory.scores.items() if name != "cut_tokens"}
    row["memory"] = trajectory.memory
    if trajectory.turns:  # an agent may name a turn's kind when it knows what the turn was
        row["turns"] = dict(Counter(turn.kind for turn in trajectory.turns))
    row["response"], row["answer"] = trajectory.response, extract_answer(trajectory.response).strip()
    return row | score_response(trajectory.response, sample.answers, sample.match)


def variation_of(sample: Sample) -> dict[str, dict[str, str | int]]:
    """The column `variation` of the bench's documents; none for other samples."""
    found = sample.metadata.get("variation")
    if not isinstance(found, dict):
        return {}
    shown = {name: found[name] for name in VARIED if isinstance(found.get(name), str | int)}
    return {"variation": shown} if shown else {}


def depths_of(sample: Sample) -> list[float]:
    """Where each piece of evidence begins, as shares of the document; empty if the metadata does not have such shares."""
    depths = sample.metadata.get("depths")
    if not isinstance(depths, list | tuple):
        return []
    valid = all(isinstance(d, int | float) and math.isfinite(d) and 0 <= d <= 1 for d in depths)
    return [float(depth) for depth in depths] if valid else []
