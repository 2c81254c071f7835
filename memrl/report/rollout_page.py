"""Sample rollouts of a training run as a web page: which chunks had the evidence, and where the memory kept or lost it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memrl.report.rendering import format_number, render
from memrl.scoring.evidence import Found, is_traceable, trace_answers
from memrl.scoring.scores import verifier_scores
from memrl.scoring.verify import after_thinking, last_boxed
from memrl.utils.journal import read_records

LAST = 20  # trajectories on a page by default; a long run logs hundreds
_REQUIRED = {"step": int, "question": str, "turns": list}  # fields of a line and their types
_OPTIONAL = {"sample": str, "answers": list, "match": str, "scores": dict, "group_rewards": list}


def read_rollouts(path: str | Path, step: int | None = None, last: int = LAST) -> list[dict]:
    """The last lines of a rollouts.jsonl, of one step if `step` is given.

    Raises:
        ValueError: the file cannot be read, a line is not a rollout, or there is none to show; names the place and what to do.
    """
    records = read_records(path)
    for number, record in records:
        _check(record, f"{path}, line {number}")
    if not records:
        raise ValueError(f"{path} holds no rollout; a run writes log.rollouts of them at each step")
    chosen = [record for _, record in records if step is None or record["step"] == step]
    if not chosen:
        steps = sorted({record["step"] for _, record in records})
        raise ValueError(f"{path} has no rollout of step {step}; its steps go from {steps[0]} to {steps[-1]}")
    return chosen[-last:]


def _check(record: dict, place: str) -> None:
    for name, kind in (_REQUIRED | _OPTIONAL).items():
        value = record.get(name)
        if not isinstance(value, kind) and (name in _REQUIRED or value is not None):
            raise ValueError(f"{place}: {name!r} must be a {kind.__name__}; is this the rollouts.jsonl of a run?")
    for turn in record["turns"]:
        texts = [turn.get("kind"), turn.get("response"), turn.get("prompt", "")] if isinstance(turn, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{place}: each of 'turns' must have a 'kind' and a 'response'; they and its 'prompt' must be text")


def rollouts_page(records: Sequence[dict], title: str) -> str:
    """The page; `records` are lines of rollouts.jsonl (see `docs/metrics.md`)."""
    return render("rollouts.html.j2", title=title, trajectories=[_trace(record) for record in records])


def _trace(record: dict[str, Any]) -> dict[str, Any]:
    """A line with its memory turns as chunks, each with the gold answers in the chunk and in the memory."""
    answers = [str(answer) for answer in record.get("answers") or []]
    memory_turns = [turn for turn in record["turns"] if turn["kind"] == "memory"]
    other_turns = [turn for turn in record["turns"] if turn["kind"] != "memory"]
    prompts, memories = [turn.get("prompt", "") for turn in memory_turns], [turn["response"] for turn in memory_turns]
    found = trace_answers(prompts, memories, record["question"].strip(), answers)
    chunks = [{"turn": turn, "found": one, "words": _describe(one)} for turn, one in zip(memory_turns, found, strict=True)]
    response = other_turns[-1]["response"] if other_turns else ""
    outcome = describe_outcome(found, response, answers, record.get("match", "any"), record.get("reward"))
    return {"record": record, "answers": answers, "chunks": chunks, "other_turns": other_turns, "outcome": outcome}


def _describe(found: Found) -> list[str]:
    """What happened to the gold answer at a chunk, in words."""
    words = ["the answer is in this chunk"] * bool(found.evidence)
    if found.is_lost:
        words.append("lost here")
    elif found.held and not found.held_before:
        words.append("written to the memory here" + ("" if found.evidence else ", though the chunk does not contain it"))
    elif found.held:
        words.append("still in the memory")
    elif found.is_missed:
        words.append("not written to the memory")
    return words


def describe_outcome(
    found: Sequence[Found], response: str, answers: Sequence[str], match: str = "any", reward: object = None
) -> str:
    """What happened to the gold answer, as a clause.

    Args:
        reward: what the trajectory earned; without a number the strict verifier's score, which is the reward of training.
    """
    if not answers:
        return "no gold answer is known"
    scores = verifier_scores(response, answers, match)
    verdict = _verdict(scores, response, reward if isinstance(reward, int | float) else scores["strict"])
    if not any(map(is_traceable, answers)):
        return f"{verdict}; the words of this answer are in any text, so they are not traced"
    in_last_memory = bool(found) and found[-1].held
    if scores["lenient"] == 1.0:
        return verdict + ("" if in_last_memory or not found else ", though the last memory does not contain the answer")
    if in_last_memory:
        return f"{verdict}, though the last memory contains the answer"
    if lost := [chunk for chunk, one in enumerate(found, 1) if one.is_lost]:
        return f"{verdict}: the memory contained the answer and lost it at chunk {lost[-1]}"
    if seen := [str(chunk) for chunk, one in enumerate(found, 1) if one.evidence]:
        return f"{verdict}: the answer is in chunk {', '.join(seen)} and was never written to the memory"
    return f"{verdict}: no chunk contains the gold answer word for word"


def _verdict(scores: dict[str, float], response: str, reward: float) -> str:
    earned = f"reward {format_number(reward)}" if reward > 0 else "no reward"
    if scores["strict"] == 1.0:
        return "answered right" + ("" if reward > 0 else f", but {earned}")
    if scores["lenient"] == 0.0:
        return "answered wrong" + (f", but {earned}" if reward > 0 else "")
    text = after_thinking(response)
    if last_boxed(text) is not None:
        reason = "the box is not exactly the answer"
    else:
        reason = "the box is not closed" if "\\boxed" in text or "\\fbox" in text else "there is no box"
    return f"right words, but {reason}: {earned}"
