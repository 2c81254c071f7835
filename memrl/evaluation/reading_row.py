"""One reading of a document becomes one row: the answer, its scores, its costs, and the evidence that the memory retained."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from memrl.scoring.evidence import find_answers, is_traceable
from memrl.scoring.scores import score_response
from memrl.scoring.verify import extract_answer
from memrl.types import Sample, Turn

if TYPE_CHECKING:
    from memrl.evaluation.methods import Method
    from memrl.llm import LLM

RETAINED_STEPS = 9  # shares of the gold answers are written as digits from 0 to 9


class ReadingRecorder:
    """Called with each turn of one reading; keeps the counts and texts that its row needs.

    Attributes:
        chunks: memory turns so far.
        memory: the last memory.
        retained: one digit per memory turn, see `retained_digit`; "" if no gold answer can be traced.
        prompt_tokens, response_tokens: of all turns.
    """

    def __init__(self, sample: Sample, on_turn: Callable[[str], None] | None = None):
        """
        Args:
            on_turn: called after each turn with its kind.
        """
        self.sample, self._on_turn = sample, on_turn
        self.chunks = self.prompt_tokens = self.response_tokens = 0
        self.memory = self.retained = ""

    def __call__(self, turn: Turn) -> None:
        self.prompt_tokens += len(turn.prompt_ids)
        self.response_tokens += len(turn.response_ids)
        if turn.kind == "memory":
            self.chunks += 1
            self.memory = turn.text
            self.retained += retained_digit(turn.text, self.sample.answers, self.sample.match)
        # Only training needs the turns of a trajectory, and the prompts of a long document take much memory.
        turn.prompt_ids, turn.response_logprobs = [], []
        if self._on_turn is not None:
            self._on_turn(turn.kind)


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
    llm: LLM,
    method: Method,
    sample: Sample,
    identity: Sequence[int],
    on_turn: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run the method on the sample; returns the columns of a row that depend on the reading.

    An exception becomes the row's `error`, and the other readings go on. A failure has no response, and all scores of an empty
    answer are 0. `seconds` are wall-clock time, during which the sampler also worked on other readings. `peak_gib` is the peak
    memory of this process so far: of the GPU if one is used, null if the model runs elsewhere. `cut_tokens` are the document
    tokens that the method did not show.

    Args:
        identity: everything that the reading's randomness depends on.
    """
    recorder = ReadingRecorder(sample, on_turn)
    session = llm.session(*identity, on_turn=recorder)
    response, memory, error, tokens, cut_tokens = "", None, None, 0, 0
    began = time.perf_counter()
    try:
        tokens = len(session.encode(sample.context)) if sample.context.strip() else 0
        trajectory = await method.run(session, sample)
        response, memory = trajectory.response, trajectory.memory
        cut_tokens = int(trajectory.scores.get("cut_tokens", 0))
    except Exception as problem:
        error = one_line(problem)
    return _columns(
        recorder,
        response=response,
        memory=memory,
        tokens=tokens,
        cut_tokens=cut_tokens,
        seconds=time.perf_counter() - began,
        peak=peak_gib() if hasattr(llm, "sampler") else None,
        error=error,
    )


def unread_row(sample_id: str, problem: Exception) -> dict[str, Any]:
    """The same columns for a document that could not be made: its generator raised `problem`."""
    return _columns(ReadingRecorder(Sample(sample_id, "", "")), error=one_line(problem))


def _columns(
    recorder: ReadingRecorder,
    *,
    response: str = "",
    memory: str | None = None,
    tokens: int = 0,
    cut_tokens: int = 0,
    seconds: float = 0.0,
    peak: float | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    sample = recorder.sample
    return {
        "id": sample.id,
        "question": sample.question,
        "answers": list(sample.answers),
        "match": sample.match,
        "response": response,
        "answer": extract_answer(response).strip(),
        "memory": recorder.memory if memory is None else memory,
        **score_response(response, sample.answers, sample.match),
        "chunks": recorder.chunks,
        "tokens": tokens,
        "cut_tokens": cut_tokens,
        "prompt_tokens": recorder.prompt_tokens,
        "response_tokens": recorder.response_tokens,
        "seconds": round(seconds, 3),
        "peak_gib": peak,
        "depths": depths_of(sample),
        "held": recorder.retained,
        "error": error,
    }


def depths_of(sample: Sample) -> list[float]:
    """Where each piece of evidence begins, as shares of the document; empty if the metadata does not have such shares."""
    depths = sample.metadata.get("depths")
    if not isinstance(depths, list | tuple):
        return []
    valid = all(isinstance(d, int | float) and math.isfinite(d) and 0 <= d <= 1 for d in depths)
    return [float(depth) for depth in depths] if valid else []


def one_line(problem: Exception) -> str:
    """Why a reading failed; without an endpoint's number of tries, so that equal failures have equal texts."""
    lines = str(problem).strip().splitlines()
    reason = re.sub(r" \(try \d+ of \d+\)$", "", lines[0]) if lines else ""
    return f"{type(problem).__name__}: {reason}" if reason else type(problem).__name__


def peak_gib() -> float | None:
    """Peak memory of this process so far, in GiB: of the GPU if one is used, else of the machine; None if unknown."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return round(torch.cuda.max_memory_reserved() / 2**30, 3)
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 3)
