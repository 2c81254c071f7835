"""One reading becomes one row: its answer, its scores, what it cost, and what the memory held on the way."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from memrl.scoring.evidence import find_answers, is_traceable
from memrl.scoring.scores import SCORES, score_response
from memrl.scoring.verify import extract_answer
from memrl.types import Sample, Turn

if TYPE_CHECKING:
    from memrl.evaluation.methods import Method
    from memrl.llm import LocalLLM

HELD_STEPS = 9  # shares of the gold answers are written as digits


class Meter:
    """Counts the turns of one reading as they come, and keeps of them what a row has, no more.

    Attributes:
        chunks: memory turns so far.
        held: one digit per memory turn, see `held_digit`; "" where no gold answer can be traced.
        memory: the last memory.
        prompt_tokens, response_tokens: of all turns.
    """

    def __init__(self, sample: Sample, on_turn: Callable[[str], None] | None = None):
        """
        Args:
            on_turn: called after each turn with its kind.
        """
        self.sample, self._on_turn = sample, on_turn
        self.chunks = self.prompt_tokens = self.response_tokens = 0
        self.memory, self._held = "", []

    @property
    def held(self) -> str:
        return "".join(self._held)

    def __call__(self, turn: Turn) -> None:
        self.prompt_tokens += len(turn.prompt_ids)
        self.response_tokens += len(turn.response_ids)
        if turn.kind == "memory":
            self.chunks += 1
            self.memory = turn.text
            self._held.append(held_digit(turn.text, self.sample.answers, self.sample.match))
        # A trajectory's turns are kept for training. Nobody trains here, and a long document's prompts add up.
        turn.prompt_ids, turn.response_logprobs = [], []
        if self._on_turn is not None:
            self._on_turn(turn.kind)


def held_digit(memory: str, answers: Sequence[str], match: str) -> str:
    """floor(9 s), where s is the share of the gold answers that stand word for word in the memory; "any" has 0 and 1 alone.

    Answers whose words tell nothing (yes, no) do not count; "" where there are no others.

    >>> held_digit("red fox, grey owl", ["red fox", "blue hen"], "all"), held_digit("a red fox", ["red fox", "owl"], "any")
    ('4', '9')
    """
    traced = [answer for answer in answers if is_traceable(answer)]
    if not traced:
        return ""
    if match == "any":
        return str(HELD_STEPS * bool(find_answers(memory, traced)))
    held = sum(bool(find_answers(memory, [answer])) for answer in traced)
    return str(HELD_STEPS * held // len(traced))


async def measure(
    llm: LocalLLM,
    method: Method,
    sample: Sample,
    identity: Sequence[int],
    on_turn: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Let the method read the sample; the columns of a row that depend on it.

    Whatever goes wrong with this document is its result, and the others go on. A failure has no response, and where there is no
    answer every score is 0. `seconds` are those of the clock, while the sampler worked for others too; `peak_gib` is the most
    that this process held up to then (of the GPU where there is one, null where the model runs elsewhere).

    `cut_tokens` are those of the document that the method left out of sight.

    Args:
        identity: all that the reading's randomness depends on.
    """
    meter = Meter(sample, on_turn)
    session = llm.session(*identity, on_turn=meter)
    response, memory, error, tokens, cut = "", None, None, 0, 0
    began = time.perf_counter()
    try:
        tokens = len(session.encode(sample.context)) if sample.context.strip() else 0
        trajectory = await method.run(session, sample)
        response, memory = trajectory.response, trajectory.memory
        cut = int(trajectory.scores.get("cut_tokens", 0))
    except Exception as problem:
        error = one_line(problem)
    seconds = time.perf_counter() - began
    return {
        **describe(sample),
        "response": response,
        "answer": extract_answer(response).strip(),
        "memory": meter.memory if memory is None else memory,
        **score_response(response, sample.answers, sample.match),
        "chunks": meter.chunks,
        "tokens": tokens,
        "cut_tokens": cut,
        "prompt_tokens": meter.prompt_tokens,
        "response_tokens": meter.response_tokens,
        "seconds": round(seconds, 3),
        "peak_gib": peak_gib() if hasattr(llm, "sampler") else None,
        "depths": depths_of(sample),
        "held": meter.held,
        "error": error,
    }


def unread(sample_id: str, problem: Exception) -> dict[str, Any]:
    """The same columns where there was no document to read: its generator raised."""
    return {
        **describe(Sample(sample_id, "", "")),
        **{"response": "", "answer": "", "memory": ""},
        **dict.fromkeys(SCORES, 0.0),
        **dict.fromkeys(("chunks", "tokens", "cut_tokens", "prompt_tokens", "response_tokens"), 0),
        **{"seconds": 0.0, "peak_gib": None, "depths": [], "held": "", "error": one_line(problem)},
    }


def describe(sample: Sample) -> dict[str, Any]:
    return {"id": sample.id, "question": sample.question, "answers": list(sample.answers), "match": sample.match}


def depths_of(sample: Sample) -> list[float]:
    """Where each piece of evidence begins, as shares of the document; none where the data set does not say so in that way."""
    depths = sample.metadata.get("depths")
    if not isinstance(depths, list | tuple):
        return []
    numbers = all(isinstance(d, int | float) and math.isfinite(d) and 0 <= d <= 1 for d in depths)
    return [float(depth) for depth in depths] if numbers else []


def one_line(problem: Exception) -> str:
    """Why a reading failed; without how often an endpoint was asked, so that one kind of failure has one text."""
    lines = str(problem).strip().splitlines()
    reason = re.sub(r" \(try \d+ of \d+\)$", "", lines[0]) if lines else ""
    return f"{type(problem).__name__}: {reason}" if reason else type(problem).__name__


def peak_gib() -> float | None:
    """The most memory that this process held so far, in GiB: on the GPU where one is used, else of the machine."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return round(torch.cuda.max_memory_reserved() / 2**30, 3)
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 3)
