"""Read documents with an agent, outside of training: used by `memrl infer` and benchmarks.

    for reading in read_documents(llm, samples, agent):
        print(reading.sample.question, reading.answer)

A reading keeps the text of one memory per chunk, and no prompts or token ids.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memrl.agents import AgentConfig, run_agent
from memrl.scoring.verify import extract_answer
from memrl.types import Sample, Turn
from memrl.utils.plain_text import reason_of
from memrl.utils.seeds import stable_id

if TYPE_CHECKING:
    from memrl.llm import LLM


@dataclass
class Step:
    """One turn of a reading."""

    kind: str  # "memory" or "answer", or a word of another agent
    text: str  # the response
    tokens: int  # sampled, including the stop token
    finish_reason: str  # "stop", or "length" if the cap cut the text off
    seconds: float  # since the end of the step before
    memory: str | None = None  # the memory after this turn; None if the agent has not told it


@dataclass
class Reading:
    """One document read for one question, and its progress."""

    sample: Sample
    chunk_tokens: int
    document_tokens: int = 0  # 0 until the document is tokenised
    num_chunks: int = 0
    chunks_read: int = 0
    steps: list[Step] = field(default_factory=list)  # of the memory agent: one per chunk, and the answer
    response: str = ""  # of the answer turn
    memory: str = ""  # the last one
    memory_tokens: int = 0
    error: str | None = None  # why there is no answer, in one line
    done: bool = False  # whether there is an answer or an error
    seconds: float = 0.0  # so far

    @property
    def tokens_read(self) -> int:
        return min(self.chunks_read * self.chunk_tokens, self.document_tokens)

    @property
    def answer(self) -> str:
        r"""The last \boxed{} of the response, or all of it without one."""
        return extract_answer(self.response).strip()


def read_documents(
    llm: LLM,
    samples: Iterable[Sample],
    agent: AgentConfig,
    on_progress: Callable[[Reading], None] | None = None,
    *,
    seed: int = 0,
) -> list[Reading]:
    """Read every sample's document and answer its question, all concurrently; results in the samples' order.

    Args:
        samples: taken one by one as the sampler has room, so the iterable may be lazy.
        on_progress: called when a document is opened, after each of its turns, and when it is done.
        seed: a reading depends on it and on the sample's id, not on the other samples.
    """
    coroutines = (read_document(llm, sample, agent, (seed, stable_id(sample.id)), on_progress) for sample in samples)
    return llm.run(coroutines, concurrency=llm.concurrency)


async def read_document(
    llm: LLM,
    sample: Sample,
    agent: AgentConfig,
    identity: Sequence[int],
    on_progress: Callable[[Reading], None] | None = None,
) -> Reading:
    """One reading, as a coroutine for `llm.run`. Its random numbers depend on `identity` alone."""
    reading = Reading(sample, agent.chunk_tokens)
    report = on_progress or (lambda reading: None)
    began = time.perf_counter()

    def keep(turn: Turn) -> None:
        if not all(map(math.isfinite, turn.response_logprobs)):
            raise ValueError("outputs of the model are NaN or infinite: its weights are damaged, or too large for --dtype")
        before, reading.seconds = reading.seconds, time.perf_counter() - began
        step = Step(turn.kind, turn.text, len(turn.response_ids), turn.finish_reason, reading.seconds - before)
        reading.steps.append(step)
        steps[id(turn)] = step
        if turn.kind != "answer":  # an agent that passes over the document again has read it all after the first pass
            reading.chunks_read = min(reading.chunks_read + 1, reading.num_chunks)
        turn.response_logprobs = []
        report(reading)

    def remember(turn: Turn, memory_ids: list[int]) -> None:
        reading.memory, reading.memory_tokens = turn.memory or "", len(memory_ids)
        steps[id(turn)].memory = reading.memory
        # The agent returns its turns for training; without training, the prompts of a long document only take memory. A turn
        # that ended in a memory begins no conversation that goes on.
        turn.prompt_ids = []

    steps: dict[int, Step] = {}
    session = llm.session(*identity, on_turn=keep, on_memory=remember)
    try:
        reading.document_tokens = len(session.encode(sample.context)) if sample.context.strip() else 0
        reading.num_chunks = -(-reading.document_tokens // agent.chunk_tokens)
        reading.seconds = time.perf_counter() - began  # so that the first step's seconds do not include tokenising
        report(reading)
        trajectory = await run_agent(session, sample, agent)
        reading.response, reading.memory = trajectory.response, trajectory.memory
    except BaseException as error:  # any failure is this document's `error`; the others continue
        reading.error = reason_of(error)
    reading.seconds = time.perf_counter() - began
    reading.done = True
    report(reading)
    return reading


def chunk_pace(readings: Iterable[Reading]) -> tuple[float, float] | None:
    """Mean seconds per chunk over the first and over the last tenth of the readings of 20 or more chunks.

    With a memory of fixed size the two are equal for any length of document. None if all readings are shorter.
    """
    first, last = [], []
    for reading in readings:
        seconds = [step.seconds for step in reading.steps if step.kind == "memory"]
        if len(seconds) >= 20:
            tenth = len(seconds) // 10
            first += seconds[:tenth]
            last += seconds[-tenth:]
    return (sum(first) / len(first), sum(last) / len(last)) if first else None
