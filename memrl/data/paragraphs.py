"""Paragraphs, questions on them, a pool to draw from, and reproducible random draws."""

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple


class Paragraph(NamedTuple):
    """A title, which may be empty, and the text below it."""

    title: str
    text: str


@dataclass(frozen=True)
class Question:
    """One question of a source.

    Attributes:
        id: unique in its source.
        answers: each alone is right; each once, in the source's order, the main one first.
        gold: the paragraphs that the answer follows from, each once.
        near: the question's own distractors: paragraphs on similar subjects that come with it, each once, none of them gold.
        metadata: other fields of the source, for the sample's metadata.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[Paragraph, ...]
    near: tuple[Paragraph, ...]
    metadata: dict = field(default_factory=dict)


class Pool:
    """Paragraphs to draw from, each once and sorted; those without text are left out.

    Attributes:
        paragraphs: all of them, sorted.
    """

    def __init__(self, paragraphs: Iterable[Paragraph]):
        self.paragraphs = sorted({paragraph for paragraph in paragraphs if paragraph.text.strip()})
        self._places: dict[str, list[int]] = {}
        for place, paragraph in enumerate(self.paragraphs):
            for key in _keys(paragraph):
                self._places.setdefault(key, []).append(place)

    def num_others(self, own: Iterable[Paragraph]) -> int:
        """The number of paragraphs that `others` gives."""
        return len(self.paragraphs) - len(self._barred(own))

    def others(self, rng: random.Random, own: Iterable[Paragraph]) -> Iterator[Paragraph]:
        """All paragraphs in random order, except those that share title or text with one of `own`.

        Another version of one of those paragraphs would be evidence without a mark in the metadata.
        """
        barred = self._barred(own)
        return (self.paragraphs[place] for place in draws(rng, len(self.paragraphs)) if place not in barred)

    def _barred(self, own: Iterable[Paragraph]) -> set[int]:
        keys = {key for paragraph in own for key in _keys(paragraph)}
        return {place for key in keys for place in self._places.get(key, ())}


def _keys(paragraph: Paragraph) -> set[str]:
    """What another version of the paragraph shares with it: the text, or a title that is not empty."""
    return {paragraph.title, paragraph.text} - {""}


def sample_seed(seed: int, *parts: str | int) -> int:
    """A seed that depends on nothing but the arguments, without pattern from one sample to the next.

    Not `hash()`, whose salt differs from process to process.
    """
    text = "\n".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def draw(rng: random.Random, population: int, count: int) -> list[int]:
    """`count` different numbers below `population` in random order; a smaller count gives the start of it."""
    return list(islice(draws(rng, population), count))


def draws(rng: random.Random, population: int) -> Iterator[int]:
    """The numbers below `population` in random order, drawn one at a time.

    A Fisher-Yates shuffle that stores only the exchanged places. It calls only `random()`, the only method whose numbers Python
    guarantees to be the same in every version.
    """
    moved: dict[int, int] = {}
    for i in range(population):
        j = i + int(rng.random() * (population - i))
        yield moved.get(j, j)
        moved[j] = moved.pop(i, i)
