"""The stories of the bench: facts, a question about some of them, and its answer, without words of any language.

    two_hop      link NAME -> NAME2 and code NAME2 -> V; the question names NAME, the answer is V
    update       several codes of NAME; the last one in the document is the answer
    listing      several pets of NAME; all of them are the answer
    distractors  one code of NAME; a rumoured, a planned and a negated one, and the right value as the code of another name
    counting     several visits of NAME; their number is the answer

All draws come from the generator that is given, so a story is a function of its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass

from memrl.data.needle import FIRST_VALUES, NAMES, SECOND_VALUES

ORDERS = ("forward", "reversed")
GAPS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
PLACES = ("garden", "market", "street")
# Fewest and most facts that an answer needs, drawn by default. Two hops and one fact among lookalikes have a fixed number.
NEEDED = {"two_hop": (2, 2), "update": (2, 4), "listing": (2, 4), "distractors": (1, 1), "counting": (1, 6)}
MOST_NEEDED = 6  # counts have words up to six
NUM_VARIATIONS = 5040  # a multiple of twice every number of gaps and of every number of counts


@dataclass(frozen=True)
class Fact:
    """
    Attributes:
        kind: "code", "rumour", "plan" or "not" with a code's two words as values; "link" with a name; "pet" with an animal;
            "visit" with a place.
    """

    kind: str
    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Story:
    """
    Attributes:
        asked: kind and name of the question, for instance ("link", "alice").
        subject: the name that the answer is about; "" for a listing.
        answers, match: as in `memrl.types.Sample`.
        evidence: the facts that the answer follows from, in the document's order.
        lookalikes: facts that stand in every document of the task and must not change the answer.
        other: draws one more fact that does not change the answer.
    """

    asked: tuple[str, str]
    subject: str
    answers: tuple[str, ...]
    match: str
    evidence: tuple[Fact, ...]
    lookalikes: tuple[Fact, ...]
    other: Callable[[], Fact]


@dataclass(frozen=True)
class Variation:
    """What differs between the documents of one task and length, besides the random draws.

    Attributes:
        order: of the two facts of two_hop: "forward" (the link comes first) or "reversed"; "" for the other tasks.
        gap: chunks from the one fact of two_hop to the other, 0 if one chunk has both; None for the other tasks.
        needed: number of facts that the answer needs.
    """

    order: str
    gap: int | None
    needed: int

    def shown(self) -> dict[str, str | int]:
        """What there is of it, for metadata and rows."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None)}


def vary(task: str, number: int, num_chunks: float, most_needed: int = MOST_NEEDED) -> Variation:
    """Variation `number`: consecutive ones go through all orders, gaps and numbers of facts that a document has room for.

    Args:
        num_chunks: length of the document.
        most_needed: facts that fit into the document.
    """
    if task == "two_hop":
        gaps = [gap for gap in GAPS if gap < num_chunks]
        return Variation(ORDERS[number % 2], gaps[number // 2 % len(gaps)], 2)
    low, high = NEEDED[task]
    high = max(low, min(high, most_needed))
    return Variation("", None, low + number % (high - low + 1))


class Draws:
    """Random draws for a story.

    Attributes:
        rng: the generator.
        draw_name: draws a name, of the miniature's by default.
    """

    def __init__(self, rng: random.Random, draw_name: Callable[[random.Random], str] | None = None):
        self.rng = rng
        self.draw_name = draw_name or (lambda rng: rng.choice(NAMES))

    def name(self, *excluded: str) -> str:
        while (found := self.draw_name(self.rng)) in excluded:
            pass
        return found

    def code(self) -> tuple[str, ...]:
        return self.rng.choice(FIRST_VALUES), self.rng.choice(SECOND_VALUES)

    def codes(self, number: int) -> list[tuple[str, ...]]:
        """Different codes."""
        found: dict[tuple[str, ...], None] = {}
        while len(found) < number:
            found[self.code()] = None
        return list(found)

    def coin(self) -> bool:
        return self.rng.random() < 0.5


def two_hop(draws: Draws, variation: Variation) -> Story:
    first = draws.name()
    second = draws.name(first)
    code = draws.code()
    evidence = (Fact("link", first, (second,)), Fact("code", second, code))

    def other() -> Fact:  # the first name may have a code of its own, which is not asked for
        if draws.coin():
            return Fact("link", draws.name(first), (draws.name(),))
        return Fact("code", draws.name(second), draws.code())

    evidence = evidence if variation.order == "forward" else evidence[::-1]
    return Story(("link", first), second, (" ".join(code),), "any", evidence, (), other)


def update(draws: Draws, variation: Variation) -> Story:
    name, codes = draws.name(), draws.codes(variation.needed)
    evidence = tuple(Fact("code", name, code) for code in codes)

    def other() -> Fact:
        return Fact("code", draws.name(name), draws.code())

    return Story(("code", name), name, (" ".join(codes[-1]),), "any", evidence, (), other)


def listing(draws: Draws, variation: Variation) -> Story:
    name, pets = draws.name(), draws.rng.sample(SECOND_VALUES, variation.needed)

    def other() -> Fact:
        if draws.coin():
            return Fact("pet", draws.name(name), (draws.rng.choice(SECOND_VALUES),))
        return Fact("code", draws.name(), draws.code())

    return Story(("pet", name), "", tuple(pets), "all", tuple(Fact("pet", name, (pet,)) for pet in pets), (), other)


def distractors(draws: Draws, variation: Variation) -> Story:
    name, (right, *wrong) = draws.name(), draws.codes(4)
    lookalikes = [Fact(kind, name, code) for kind, code in zip(("rumour", "plan", "not"), wrong, strict=True)]
    lookalikes.append(Fact("code", draws.name(name), right))

    def other() -> Fact:
        return Fact(draws.rng.choice(("code", "rumour", "plan", "not")), draws.name(name), draws.code())

    evidence = (Fact("code", name, right),)
    return Story(("code", name), name, (" ".join(right),), "any", evidence, tuple(lookalikes), other)


def counting(draws: Draws, variation: Variation) -> Story:
    name = draws.name()

    def visit(visitor: str) -> Fact:
        return Fact("visit", visitor, (draws.rng.choice(PLACES),))

    def other() -> Fact:
        return visit(draws.name(name)) if draws.coin() else Fact("code", draws.name(), draws.code())

    evidence = tuple(visit(name) for _ in range(variation.needed))
    return Story(("visit", name), name, (str(variation.needed),), "any", evidence, (), other)


STORIES = {story.__name__: story for story in (two_hop, update, listing, distractors, counting)}
TASKS = tuple(STORIES)
