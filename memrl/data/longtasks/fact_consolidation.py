"""Fact consolidation: numbered facts of which later ones override earlier ones; single-hop and multi-hop questions.

17. Omar Kalomin works for Lutabes Works.
91. Omar Kalomin works for Daropim Works.

As FactConsolidation of MemoryAgentBench (arXiv 2507.05257), here about people and places that do not exist.
"""

import random
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from memrl.data.paragraphs import draws
from memrl.data.ruler.draws import Endless, below, pick
from memrl.data.ruler.fitting import Document
from memrl.data.ruler.task import Plan, Rng, SyntheticTask

FORMAT = "1"  # raised when the same arguments give another sample


class Relation(NamedTuple):
    """A relation between two types of things, as a statement and as a phrase that names the value."""

    subject: str
    value: str
    statement: str
    phrase: str


RELATIONS = (
    Relation("person", "company", "{} works for {}.", "the company that {} works for"),
    Relation("person", "town", "{} was born in {}.", "the birthplace of {}"),
    Relation("person", "person", "{} was taught by {}.", "the teacher of {}"),
    Relation("company", "town", "{} has its seat in {}.", "the town in which {} has its seat"),
    Relation("company", "person", "{} was founded by {}.", "the founder of {}"),
    Relation("town", "country", "{} lies in {}.", "the country in which {} lies"),
    Relation("town", "person", "The mayor of {} is {}.", "the mayor of {}"),
    Relation("country", "person", "The ruler of {} is {}.", "the ruler of {}"),
    Relation("country", "language", "The language of {} is {}.", "the language of {}"),
)
SUBJECTS = ("person", "company", "town", "country")
NAMES = {"person": "{given} {}", "company": "{} Works", "town": "{}ford", "country": "{}ia", "language": "{}ish"}
GIVEN = "Omar Ines Hugo Mona Oleg Vera Emil Dina".split()
HOPS, MOST_VERSIONS = (2, 3, 4), 4
MOST_SINGLE, MOST_MULTI = MOST_VERSIONS + 2, 60  # lines about the things of a chain: 1 or 15 subjects, 2 more lines on each
_CONSONANTS, _VOWELS, _ENDS = "bdfghjklmnprstvwz", "aeiou", "lmnrst"
_OPEN = len(_CONSONANTS) * len(_VOWELS)  # syllables without a consonant at the end
NUM_NAMES = _OPEN**3 * len(_ENDS)
_RULE = "The facts are numbered. Where facts contradict each other, the one with the highest number holds."


class Fact(NamedTuple):
    """A statement and where it stands: a share of the list of facts, from 0 to 1."""

    share: float
    text: str


def name(kind: str, number: int) -> str:
    """The name of a number from 0 to NUM_NAMES - 1: seven letters, so none is part of another, and the mark of its kind."""
    letters = ""
    rest, end = divmod(number, len(_ENDS))
    for _ in range(3):
        rest, syllable = divmod(rest, _OPEN)
        letters += _CONSONANTS[syllable // len(_VOWELS)] + _VOWELS[syllable % len(_VOWELS)]
    return NAMES[kind].format(f"{letters}{_ENDS[end]}".capitalize(), given=GIVEN[number % len(GIVEN)])


class Knowledge:
    """Makes facts about things whose names are all different.

    Attributes:
        known: by kind, the things that have facts of their own.
    """

    def __init__(self, rng: random.Random, names: Iterator[int], known: dict[str, list[str]]):
        self.rng, self.names, self.known = rng, names, known

    def new(self, kind: str) -> str:
        return name(kind, next(self.names))

    def _known_or_new(self, kind: str) -> str:
        known = self.known[kind]
        return pick(self.rng, known) if known and below(self.rng, 2) else self.new(kind)

    def versions(self) -> int:
        """How often a fact is stated: half of the facts once, the others 2 to MOST_VERSIONS times with other values."""
        return 1 if below(self.rng, 2) else 2 + below(self.rng, MOST_VERSIONS - 1)

    def states(self, relation: Relation, subject: str, values: list[str]) -> list[Fact]:
        """A fact and its later versions: the values in order, at places drawn uniformly."""
        shares = sorted(self.rng.random() for _ in values)
        texts = [relation.statement.format(subject, value) for value in values]
        return [Fact(share, text) for share, text in zip(shares, texts, strict=True)]

    def others(self) -> Iterator[Fact]:
        """Facts without end about other things; half of their values are things that have facts of their own."""
        while True:
            kind = pick(self.rng, SUBJECTS)
            subject = self.new(kind)
            for relation in (one for one in RELATIONS if one.subject == kind):
                values = [self._known_or_new(relation.value) for _ in range(self.versions())]
                yield from self.states(relation, subject, values)
            self.known[kind].append(subject)

    def chain(self, subject: str, relations: list[Relation], versions: int) -> tuple[list[Fact], list[Fact], str]:
        """The facts that lead from a subject along relations, each in several versions, and as many hops on from stale values.

        Returns:
            The facts that hold, one a hop; all others, another fact on each subject among them; the last value.
        """
        first, *rest = relations
        self.known[first.subject].append(subject)
        values = [self.new(first.value) for _ in range(versions)]
        *stale, held = self.states(first, subject, values)
        further = pick(self.rng, [one for one in RELATIONS if one.subject == first.subject and one != first])
        stale += self.states(further, subject, [self.new(further.value) for _ in range(1 + below(self.rng, 2))])
        if not rest:
            return [held], stale, values[-1]
        for value in values[:-1]:
            found, others, _ = self.chain(value, rest, versions)
            stale += found + others
        path, others, answer = self.chain(values[-1], rest, versions)
        return [held, *path], stale + others, answer


def draw_relations(rng: random.Random, hops: int) -> list[Relation]:
    """Relations of which each begins with the type that the one before leads to."""
    found = [pick(rng, RELATIONS)]
    while len(found) < hops:
        further = [one for one in RELATIONS if one.subject == found[-1].value]
        found = [*found, pick(rng, further)] if further else [pick(rng, RELATIONS)]
    return found


class FactConsolidation(SyntheticTask):
    """single: one fact in 2 to 4 versions. multi: a chain of 2 to 4 facts, each in 2 versions."""

    answer_tokens = 32
    format = FORMAT

    def plan(self, length: int, rng: Rng) -> Plan:
        sizes, names = rng("sizes"), draws(rng("names"), NUM_NAMES)
        hops, versions = (1, 2 + below(sizes, MOST_VERSIONS - 1)) if self.name.endswith("single") else (pick(sizes, HOPS), 2)
        knowledge = Knowledge(rng("asked"), names, {kind: [] for kind in NAMES})
        relations = draw_relations(rng("relations"), hops)
        subject = knowledge.new(relations[0].subject)
        path, stale, answer = knowledge.chain(subject, relations, versions)
        others = Endless(Knowledge(rng("others"), names, knowledge.known).others())

        def build(units: int) -> Document:
            facts = sorted([*path, *stale, *others.first(units)])
            lines = [f"{number}. {fact.text}" for number, fact in enumerate(facts)]
            begins = dict(zip(facts, accumulate((len(line) + 1 for line in lines), initial=0), strict=False))
            details = {"chance": versions**-hops, "hops": hops, "versions": versions, "facts": len(facts)}
            return Document("\n".join(lines), tuple(begins[fact] for fact in path), details)

        # Shorter chains leave room for more other facts, so that all samples need about the same length.
        smallest = (MOST_SINGLE if hops == 1 else MOST_MULTI) - len(path) - len(stale)
        phrase = subject
        for relation in relations:
            phrase = relation.phrase.format(phrase)
        question = f"{_RULE} What is {phrase}? Answer with the name alone."
        return Plan(question, (answer,), "any", build, smallest, step=32)
