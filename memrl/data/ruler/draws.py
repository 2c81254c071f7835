"""Draw numbers, letters and UUIDs, and shuffle.

As in `memrl.data.paragraphs`, all numbers come from `random.Random.random()`, the only method whose numbers Python guarantees to
be the same in every version.
"""

import random
from collections.abc import Iterator, MutableSequence, Sequence
from itertools import islice
from typing import Generic, TypeVar
from uuid import UUID

from memrl.data.paragraphs import draw

_CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGITS = "0123456789abcdef"

Item = TypeVar("Item")


class Endless(Generic[Item]):
    """An endless sequence of which each item is made once, however often its beginning is asked for."""

    def __init__(self, items: Iterator[Item]):
        self._items, self._made = items, list[Item]()

    def first(self, number: int) -> list[Item]:
        self._made.extend(islice(self._items, max(0, number - len(self._made))))
        return self._made[:number]


def below(rng: random.Random, number: int) -> int:
    """A whole number from 0 to `number` - 1."""
    return int(rng.random() * number)


def pick(rng: random.Random, items: Sequence[Item]) -> Item:
    """One of the items."""
    return items[below(rng, len(items))]


def pick_some(rng: random.Random, items: Sequence[Item], number: int) -> list[Item]:
    """`number` different ones of the items, in random order."""
    return [items[index] for index in draw(rng, len(items), number)]


def shuffle(rng: random.Random, items: MutableSequence) -> None:
    """Put the items in a random order, in place."""
    items[:] = [items[index] for index in draw(rng, len(items), len(items))]


def distinct_letters(rng: random.Random, length: int, count: int) -> list[str]:
    """`count` different strings of `length` capitals; a smaller count gives the start of the list."""
    found: dict[str, None] = {}
    while len(found) < count:
        found.setdefault("".join(_CAPITALS[below(rng, 26)] for _ in range(length)))
    return list(found)


def uuid(rng: random.Random) -> str:
    """A random UUID in its usual form (RFC 9562, version 4: of the 128 bits, 122 are random)."""
    digits = [_DIGITS[below(rng, 16)] for _ in range(32)]
    digits[16] = _DIGITS[8 + below(rng, 4)]
    return str(UUID("".join(digits), version=4))
