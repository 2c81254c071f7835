"""Paragraphs, questions on them, and random draws: what every question-answering task of long documents is made from."""

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
        metadata: what the source says about it besides; goes into the sample's metadata.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[Paragraph, ...]
    near: tuple[Paragraph, ...]
    metadata: dict = field(default_factory=dict)


class Pool:
    """Paragraphs to draw from, each once, whatever the order in which they come; those without text are left out.

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
        """How many paragraphs `others` gives."""
        return len(self.paragraphs) - len(self._barred(own))

    def others(self, rng: random.Random, own: Iterable[Paragraph]) -> Iterator[Paragraph]:
        """All paragraphs in random order, but for those that share title or text with one of `own`.

        Another version of an own paragraph would be evidence that nobody knows of.
        """
        barred = self._barred(own)
        return (self.paragraphs[place] for place in draws(rng, len(self.paragraphs)) if place not in barred)

    def _barred(self, own: Iterable[Paragraph]) -> set[int]:
        keys = {key for paragraph in own for key in _keys(paragraph)}
        return {place for key in keys for place in self._places.get(key, ())}


def _keys(paragraph: Paragraph) -> set[str]:
    """What another version of the paragraph has in common with it; an empty title says nothing."""
    return {paragraph.title, paragraph.text} - {""}


def sample_seed(seed: int, *parts: str | int) -> int:
    """A number that depends on the seed and the parts alone and differs without pattern from one sample to the next.

    Not `hash()`, which Python salts anew in every process.
    """
    text = "\n".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def draw(rng: random.Random, population: int, count: int) -> list[int]:
    """`count` different numbers below `population` in random order; a smaller count gives the start of it."""
    return list(islice(draws(rng, population), count))


def draws(rng: random.Random, population: int) -> Iterator[int]:
    """The numbers below `population` in random order, each drawn when it is asked for.

    A Fisher-Yates shuffle that remembers only the places that have been exchanged. It calls nothing but `random()`, the only
    method whose numbers Python promises to keep from one version to the next.
    """
    moved: dict[int, int] = {}
    for i in range(population):
        j = i + int(rng.random() * (population - i))
        yield moved.get(j, j)
        moved[j] = moved.pop(i, i)
