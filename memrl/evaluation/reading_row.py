"""One reading of a document becomes one row: the answer, its scores, its costs, and the evidence that the memory retained."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from memrl.scoring.evidence import find_answers, is_traceable
from memrl.scoring.scores import score_response
from memrl.scoring.verify import extract_answer
from memrl.types import Sample, Trajectory, Turn
from memrl.utils.devices import peak_gib

if TYPE_CHECKING:
    from memrl.evaluation.methods import Method
    from memrl.llm import LLM

RETAINED_STEPS = 9  # shares of the gold answers are written as digits from 0 to 9


def new_row(sample: Sample) -> dict[str, Any]:
    """The columns of a row that depend on the reading, before it begins.

    memory: the last memory.
    chunks: memory turns.
    tokens, cut_tokens: of the document; those of them that the method did not show.
    prompt_tokens, response_tokens: of all turns.
    seconds: wall-clock time, during which the sampler also worked on other readings.
    peak_gib: peak memory of this process so far: of the GPU if one is used, None if the model runs elsewhere.
    held: one digit per memory turn, see `retained_digit`; "" if no gold answer can be traced.
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
        "seconds": 0.0,
        "peak_gib": None,
        "depths": depths_of(sample),
        "held": "",
        "error": None,
    }


def add_turn(row: dict[str, Any], sample: Sample, turn: Turn) -> None:
    """Count a turn in the row, and free the parts of it that only training needs: prompts of a long document take much memory."""
    row["prompt_tokens"] += len(turn.prompt_ids)
    row["response_tokens"] += len(turn.response_ids)
    if turn.kind == "memory":
        row["chunks"] += 1
        row["memory"] = turn.text
        row["held"] += retained_digit(turn.text, sample.answers, sample.match)
    turn.prompt_ids, turn.response_logprobs = [], []


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
    """Run the method on the sample; returns `new_row`'s columns.

    An exception becomes the row's `error`, and the other readings go on. A failure has no response, and all scores of an empty
    answer are 0.

    Args:
        identity: everything that the reading's randomness depends on.
        on_turn: called after each turn with its kind.
    """
    row = new_row(sample)

    def record(turn: Turn) -> None:
        add_turn(row, sample, turn)
        if on_turn is not None:
            on_turn(turn.kind)

    session = llm.session(*identity, on_turn=record)
    began = time.perf_counter()
    try:
        row["tokens"] = len(session.encode(sample.context)) if sample.context.strip() else 0
        trajectory = await method.run(session, sample)
    except Exception as problem:
        row["error"], trajectory = one_line(problem), Trajectory(memory=row["memory"])
    row["seconds"] = round(time.perf_counter() - began, 3)
    row["peak_gib"] = peak_gib() if hasattr(llm, "sampler") else None
    row["cut_tokens"] = int(trajectory.scores.get("cut_tokens", 0))
    row["memory"] = row["memory"] if trajectory.memory is None else trajectory.memory
    row["response"], row["answer"] = trajectory.response, extract_answer(trajectory.response).strip()
    return row | score_response(trajectory.response, sample.answers, sample.match)


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
