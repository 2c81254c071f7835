"""One reading of a document becomes one row: the answer, its scores, its costs, and the evidence that the memory retained."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memrl.scoring.evidence import find_answers, is_traceable
from memrl.scoring.scores import score_response
from memrl.scoring.verify import extract_answer
from memrl.types import Sample, Turn

if TYPE_CHECKING:
    from memrl.evaluation.methods import Method
    from memrl.llm import LLM

RETAINED_STEPS = 9  # shares of the gold answers are written as digits from 0 to 9


@dataclass
class ReadingRecorder:
    """Counts and texts of one reading; called with each of its turns.

    Attributes:
        on_turn: called after each turn with its kind.
        memory: the last memory.
        retained: one digit per memory turn, see `retained_digit`; "" if no gold answer can be traced.
        chunks: memory turns.
        tokens, cut_tokens: of the document; those of them that the method did not show.
        prompt_tokens, response_tokens: of all turns.
        seconds: wall-clock time, during which the sampler also worked on other readings.
        peak_gib: peak memory of this process so far: of the GPU if one is used, None if the model runs elsewhere.
    """

    sample: Sample
    on_turn: Callable[[str], None] | None = None
    response: str = ""
    memory: str = ""
    retained: str = ""
    chunks: int = 0
    tokens: int = 0
    cut_tokens: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    seconds: float = 0.0
    peak_gib: float | None = None
    error: str | None = None

    def __call__(self, turn: Turn) -> None:
        self.prompt_tokens += len(turn.prompt_ids)
        self.response_tokens += len(turn.response_ids)
        if turn.kind == "memory":
            self.chunks += 1
            self.memory = turn.text
            self.retained += retained_digit(turn.text, self.sample.answers, self.sample.match)
        # Only training needs the turns of a trajectory, and the prompts of a long document take much memory.
        turn.prompt_ids, turn.response_logprobs = [], []
        if self.on_turn is not None:
            self.on_turn(turn.kind)

    def row(self) -> dict[str, Any]:
        """The columns of a row that depend on the reading."""
        sample = self.sample
        return {
            "id": sample.id,
            "question": sample.question,
            "answers": list(sample.answers),
            "match": sample.match,
            "response": self.response,
            "answer": extract_answer(self.response).strip(),
            "memory": self.memory,
            **score_response(self.response, sample.answers, sample.match),
            "chunks": self.chunks,
            "tokens": self.tokens,
            "cut_tokens": self.cut_tokens,
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
            "seconds": round(self.seconds, 3),
            "peak_gib": self.peak_gib,
            "depths": depths_of(sample),
            "held": self.retained,
            "error": self.error,
        }


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
) -> dict[str, Any]:
    """Run the method on the sample; returns `ReadingRecorder.row`.

    An exception becomes the row's `error`, and the other readings go on. A failure has no response, and all scores of an empty
    answer are 0.

    Args:
        identity: everything that the reading's randomness depends on.
    """
    recorder = ReadingRecorder(sample, on_turn)
    session = llm.session(*identity, on_turn=recorder)
    began = time.perf_counter()
    try:
        recorder.tokens = len(session.encode(sample.context)) if sample.context.strip() else 0
        trajectory = await method.run(session, sample)
        recorder.response = trajectory.response
        recorder.memory = recorder.memory if trajectory.memory is None else trajectory.memory
        recorder.cut_tokens = int(trajectory.scores.get("cut_tokens", 0))
    except Exception as problem:
        recorder.error = one_line(problem)
    recorder.seconds = time.perf_counter() - began
    recorder.peak_gib = peak_gib() if hasattr(llm, "sampler") else None
    return recorder.row()


def unread_row(sample_id: str, problem: Exception) -> dict[str, Any]:
    """The same columns for a document that could not be made: its generator raised `problem`."""
    return ReadingRecorder(Sample(sample_id, "", ""), error=one_line(problem)).row()


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
