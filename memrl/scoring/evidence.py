"""Where in a reading the gold answer stood, and what became of it: by its words alone.

A prompt of a memory turn is words of the prompt file around the question, the memory and a chunk, in an order that differs from
prompt file to prompt file. Only the chunk differs from turn to turn besides the memory, and the memory is the turn before's
response; that is enough to tell where in the prompt the chunk is, without the tokenizer or the prompt file.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

_CLOSED = {"yes", "no", "noanswer", "true", "false"}
_ARTICLES = {"a", "an", "the"}


@dataclass(frozen=True)
class Found:
    """What is known of one chunk.

    Attributes:
        evidence: where in the prompt the chunk holds a gold answer, as [start, end) of characters, in order.
        held_before, held: whether the memory held a gold answer before and after it.
    """

    evidence: list[tuple[int, int]]
    held_before: bool
    held: bool

    @property
    def is_lost(self) -> bool:
        return self.held_before and not self.held

    @property
    def is_missed(self) -> bool:
        return bool(self.evidence) and not self.held_before and not self.held


def trace_answers(prompts: Sequence[str], memories: Sequence[str], question: str, answers: Sequence[str]) -> list[Found]:
    """Follow the gold answers through the memory turns of a trajectory.

    Args:
        prompts: of the memory turns, in order; empty ones where they are not known.
        memories: their responses.
    """
    found, held = [], False
    for prompt, (low, high), memory in zip(prompts, chunk_spans(prompts, memories), memories, strict=True):
        asked = [match.span() for match in re.finditer(re.escape(question), prompt)] if question else []
        evidence = [
            (start, end)
            for start, end in find_answers(prompt, answers)
            if end > low and start < high and not any(a <= start and end <= b for a, b in asked)
        ]
        before, held = held, bool(find_answers(memory, answers))
        found.append(Found(evidence, before, held))
    return found


def find_answers(text: str, answers: Sequence[str]) -> list[tuple[int, int]]:
    """Where any of the answers stands in the text, word for word: [start, end), in order, without overlaps.

    Case, punctuation, spaces between the words and a leading article do not count.
    """
    spans: list[tuple[int, int]] = []
    for start, end in sorted(m.span() for answer in answers if is_traceable(answer) for m in _pattern(answer).finditer(text)):
        if not spans or start >= spans[-1][1]:
            spans.append((start, end))
    return spans


def is_traceable(answer: str) -> bool:
    """Whether the answer's words say where it comes from; those of "yes" and "no" stand everywhere and tell nothing."""
    words = re.findall(r"\w+", answer.casefold())
    return bool(answer.strip()) and "".join(words) not in _CLOSED


@cache
def _pattern(answer: str) -> re.Pattern:
    words = re.findall(r"[^\W_]+", answer)
    if len(words) > 1 and words[0].casefold() in _ARTICLES:
        words = words[1:]
    if not words:
        return re.compile(re.escape(answer.strip()))
    body = r"[\W_]*".join(map(re.escape, words))
    before = r"(?<![^\W_])" if _ends_words(words[0][0]) else ""
    after = r"(?![^\W_])" if _ends_words(words[-1][-1]) else ""
    return re.compile(before + body + after, re.IGNORECASE)


def _ends_words(char: str) -> bool:
    # From Thai on (U+0E00) most scripts put no spaces between words; Latin and Greek go on in U+1E00 to U+1FFF.
    return char < "\u0e00" or "\u1e00" <= char < "\u2000"


def chunk_spans(prompts: Sequence[str], memories: Sequence[str]) -> list[tuple[int, int]]:
    """Where in each prompt of a trajectory's memory turns its chunk is, as [start, end) of characters.

    What all prompts begin and end with is the prompt file's. Of what is left, the response of the turn before is the memory,
    which stands at one of the ends. The first prompt's is unknown, so its span takes the words for "no memory" in. A span may
    miss characters that all chunks begin or end with.
    """
    if len(prompts) < 2:
        return [(0, len(prompt)) for prompt in prompts]
    head = _common_length(prompts)
    tail = min(_common_length([prompt[::-1] for prompt in prompts]), min(map(len, prompts)) - head)
    known = [memory.strip() for memory in memories[:-1]]
    pairs = [(prompt, memory) for prompt, memory in zip(prompts[1:], known, strict=True) if memory]
    first = [_slot_after(prompt, memory, head) for prompt, memory in pairs]
    last = [_slot_before(prompt, memory, tail) for prompt, memory in pairs]
    memory_comes_first = sum(slot is not None for slot in first) >= sum(slot is not None for slot in last)
    spans = [(head, len(prompts[0]) - tail)]
    for prompt, memory in zip(prompts[1:], known, strict=True):
        low, high = head, len(prompt) - tail
        if memory_comes_first:
            slot = _slot_after(prompt, memory, head)
            low = low + len(memory) if slot is None else slot[1]
        else:
            slot = _slot_before(prompt, memory, tail)
            high = high - len(memory) if slot is None else slot[0]
        spans.append((low, high))
    return spans


def _common_length(texts: Sequence[str]) -> int:
    """Characters that all texts begin with; what the first and the last in order share, all share."""
    first, last = min(texts), max(texts)
    return next((index for index, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))


def _slot_after(prompt: str, memory: str, head: int) -> tuple[int, int] | None:
    """The memory where it begins no later than the common head does end; memories may begin alike, so it may begin earlier."""
    gap = len(prompt[head:]) - len(prompt[head:].lstrip())
    start = prompt.rfind(memory, 0, head + gap + len(memory))
    return None if start < 0 else (start, start + len(memory))


def _slot_before(prompt: str, memory: str, tail: int) -> tuple[int, int] | None:
    """The same from the end."""
    body = prompt[: len(prompt) - tail]
    gap = len(body) - len(body.rstrip())
    start = prompt.find(memory, max(0, len(body) - gap - len(memory)))
    return None if start < 0 else (start, start + len(memory))
