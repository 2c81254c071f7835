"""Find the gold answers in the chunks and memories of a reading, by their words."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

_CLOSED = {"yes", "no", "noanswer", "true", "false"}
_ARTICLES = {"a", "an", "the"}


@dataclass(frozen=True)
class Found:
    """The gold answers in one chunk and in the memory around it."""

    evidence: list[tuple[int, int]]  # their positions in the chunk, as [start, end) in characters of the prompt, in order
    held_before: bool  # whether the memory held one before the chunk
    held: bool  # whether it holds one after it

    @property
    def is_lost(self) -> bool:
        return self.held_before and not self.held

    @property
    def is_missed(self) -> bool:
        return bool(self.evidence) and not self.held_before and not self.held


def trace_answers(prompts: Sequence[str], memories: Sequence[str], question: str, answers: Sequence[str]) -> list[Found]:
    """Follow the gold answers through a trajectory's memory turns: their prompts ("" if unknown) and their responses."""
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
    """Positions of any of the answers in the text, word for word: [start, end), in order, without overlaps.

    Case, punctuation, spaces between the words and a leading article are ignored.
    """
    spans: list[tuple[int, int]] = []
    for start, end in sorted(m.span() for answer in answers if is_traceable(answer) for m in _pattern(answer).finditer(text)):
        if not spans or start >= spans[-1][1]:
            spans.append((start, end))
    return spans


def is_traceable(answer: str) -> bool:
    """Whether the answer can be found by its words; "yes" and "no" are in any text and prove nothing."""
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
    # From Thai (U+0E00) on, most scripts put no spaces between words; U+1E00 to U+1FFF is Latin and Greek again.
    return char < "\u0e00" or "\u1e00" <= char < "\u2000"


def chunk_spans(prompts: Sequence[str], memories: Sequence[str]) -> list[tuple[int, int]]:
    """The position of the chunk in each prompt of a trajectory's memory turns, as [start, end) in characters.

    Found without the tokenizer or the prompt file: the common beginning and end of all prompts belong to the prompt file. In the
    rest, the response of the turn before is the memory, at one of the two ends. The first memory is unknown, so the first span
    includes the words for "no memory". A span may miss characters that all chunks begin or end with.
    """
    if len(prompts) < 2:
        return [(0, len(prompt)) for prompt in prompts]
    head = _common_length(prompts)
    tail = min(_common_length([prompt[::-1] for prompt in prompts]), min(map(len, prompts)) - head)
    spans = [(head, len(prompts[0]) - tail)]
    pairs = [(prompt, memory.strip()) for prompt, memory in zip(prompts[1:], memories, strict=False)]
    after_head = [_memory_end(prompt, memory, head) for prompt, memory in pairs]
    before_tail = [_memory_end(prompt[::-1], memory[::-1], tail) for prompt, memory in pairs]
    memory_comes_first = after_head.count(None) <= before_tail.count(None)
    for (prompt, memory), low, high in zip(pairs, after_head, before_tail, strict=True):
        if memory_comes_first:
            spans.append((head + len(memory) if low is None else low, len(prompt) - tail))
        else:
            spans.append((head, len(prompt) - (tail + len(memory) if high is None else high)))
    return spans


def _common_length(texts: Sequence[str]) -> int:
    """Length of the common prefix of all texts, which is that of the smallest and the largest."""
    first, last = min(texts), max(texts)
    return next((index for index, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))


def _memory_end(prompt: str, memory: str, head: int) -> int | None:
    """End of the memory behind the common head; it may begin inside the head if memories begin alike. None if it is not there."""
    gap = len(prompt[head:]) - len(prompt[head:].lstrip())
    start = prompt.rfind(memory, 0, head + gap + len(memory))
    return None if start < 0 else start + len(memory)
