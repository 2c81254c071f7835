"""Read the parts of a response by their form, group pieces of evidence, and await several responses at once."""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_left, bisect_right
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from memrl.llm import Session
    from memrl.types import Turn

T = TypeVar("T")


class Span(NamedTuple):
    """Characters `start` to `end` of a response's text."""

    start: int
    end: int


def response_text(llm: Session, turn: Turn) -> str:
    """The response without stop tokens and those that `decode` does not show."""
    return llm.decode(llm.content_ids(turn))


def find_tag(text: str, name: str) -> Span | None:
    """Where the last `<name>...</name>` of the text has its content; case does not matter.

    >>> find_tag("<next>end</next>", "next")
    Span(start=6, end=9)
    """
    matches = list(re.finditer(rf"<{name}>((?:(?!<{name}>).)*?)</{name}>", text, re.DOTALL | re.IGNORECASE))
    return Span(*matches[-1].span(1)) if matches else None


def tag_word(text: str, name: str) -> str:
    """The content of the last `<name>...</name>` in lower case, without blanks and a full stop around it; "" without one.

    >>> tag_word("<check> Yes.</check>", "check")
    'yes'
    """
    span = find_tag(text, name)
    return text[span.start : span.end].strip(" \t\r\n.").lower() if span else ""


def part_ids(llm: Session, turn: Turn, span: Span) -> list[int]:
    """The sampled ids of a part of `response_text`, without the blanks around it.

    If a token reaches over an end of the part, the part's text is encoded again; never more ids than the response has.
    """
    ids = llm.content_ids(turn)
    raw = llm.decode(ids)[span.start : span.end]
    text = raw.strip()
    start = span.start + len(raw) - len(raw.lstrip())

    def end_of(count: int) -> int:
        return len(llm.decode(ids[:count]))

    counts = range(len(ids) + 1)
    part = ids[max(bisect_right(counts, start, key=end_of) - 1, 0) : bisect_left(counts, start + len(text), key=end_of)]
    return part if llm.decode(part).strip() == text else llm.encode(text)[: len(ids)]


def in_groups(pieces: Sequence[list[int]], room: int, between: list[int], least: int = 1) -> list[list[list[int]]]:
    """Consecutive pieces in groups of at most `room` ids with `between` between the pieces; `least` pieces stand together anyway.

    >>> in_groups([[1, 1], [2, 2], [3], [4, 4, 4, 4]], room=5, between=[0])
    [[[1, 1], [2, 2]], [[3]], [[4, 4, 4, 4]]]
    """
    groups: list[list[list[int]]] = []
    for piece in pieces:
        if groups and (len(groups[-1]) < least or len(joined([*groups[-1], piece], between)) <= room):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def joined(pieces: Sequence[list[int]], between: list[int]) -> list[int]:
    """
    >>> joined([[1], [2, 3]], between=[0])
    [1, 0, 2, 3]
    """
    return [token for piece in pieces for token in (*between, *piece)][len(between) :]


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; if a call fails, the others are cancelled before the error goes on."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
