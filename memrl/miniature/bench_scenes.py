"""Scenes of the memory bench's lessons: a question, what is known of its answer, and a section that may say more.

What is known begins with the question's name, and is written in the fewest words. V1 V2 are a code's values, P a pet:

    question     nothing known                      part of it                       all of it
    code NAME    NAME none                                                           NAME V1 V2
    link NAME    NAME none, NAME none X V1 V2       NAME NAME2 none                  NAME NAME2 V1 V2
                 (a code that may be the right one) (who has the code)
    pet NAME     NAME none                                                           NAME P2 P1 (the latest first)
    visit NAME   NAME none                                                           NAME three

So each value follows the word just written or one that stands beside it, which a model of two layers can look up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memrl.data.bench.miniature import COUNTS, sentence
from memrl.data.bench.stories import PLACES, Fact
from memrl.data.needle import NAMES, SECOND_VALUES, draw_filler, draw_name, draw_values

KINDS = ("code", "link", "pet", "visit")
OTHERS = {  # facts about other names in a document with this question, see memrl/data/bench/stories.py
    "code": ("code", "code", "rumour", "plan", "not"),
    "link": ("code", "link"),
    "pet": ("pet", "code"),
    "visit": ("visit", "code"),
}
OTHER_SHARE = 0.35  # of the sentences; a little above the bench's
MOST_PETS, MOST_VISITS = 4, 6


@dataclass(frozen=True)
class Scene:
    """
    Attributes:
        kind, name: of the question.
        target: the name whose code is asked for; `name` itself but for a link.
        before: what is known before the section is read.
        found: what the section says about the answer, one piece per fact; no piece repeats what is known.
        section: its sentences.
    """

    kind: str
    name: str
    target: str
    before: str
    found: tuple[str, ...]
    section: tuple[str, ...]

    @property
    def question(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def after(self) -> str:
        return absorb(self.kind, self.name, self.before, self.found)

    def forgotten(self) -> Scene:
        """The same section read without knowing anything."""
        found = self.found
        if self.kind == "pet":
            found = tuple(" ".join(words[1:3]) for words in map(str.split, self.section) if words[:2] == ["pet", self.name])
        return replace(self, before=f"{self.name} none", found=found)

    @property
    def codes(self) -> list[str]:
        """Names and values of the section's codes."""
        return [" ".join(words[1:4]) for words in map(str.split, self.section) if words[0] == "code"]

    @property
    def last_code(self) -> str:
        """The code that the section ends in; "" if it ends in something else."""
        return self.codes[-1] if self.section[-1].startswith("code ") else ""


def absorb(kind: str, name: str, before: str, pieces: Sequence[str]) -> str:
    """What is known after some pieces of evidence; pieces about other names change nothing.

    >>> absorb("code", "emma", "emma tiny fox", ["emma grey owl", "simon red bear"])
    'emma grey owl'
    >>> absorb("link", "emma", "emma none simon red bear", ["emma simon none"])
    'emma simon red bear'
    >>> absorb("pet", "emma", "emma owl", ["emma fox", "emma owl"]), absorb("visit", "emma", "emma one", ["emma two"])
    ('emma fox owl', 'emma three')
    """
    words, split = before.split(), [piece.split() for piece in pieces]
    own = [piece for piece in split if piece[0] == name and piece[1] != "none"]
    if kind == "link":
        return " ".join(_follow(words, own, split))
    if kind == "code":
        return " ".join(own[-1] if own else words)
    if kind == "visit":
        counts: list[str] = list(COUNTS)
        return f"{name} {counts[min(sum(counts.index(piece[1]) for piece in [words, *own]), MOST_VISITS)]}"
    pets: list[str] = [word for word in words[1:] if word != "none"]
    pets = list(dict.fromkeys([*(pet for piece in own for pet in piece[1:] if pet not in pets), *pets]))
    return " ".join((name, *(pets[:MOST_PETS] or ["none"])))


def _follow(words: list[str], own: list[list[str]], pieces: list[list[str]]) -> list[str]:
    """What is known of a link: its target, then the target's code."""
    target = words[1] if words[1] != "none" else next((piece[1] for piece in own), "none")
    if target == "none":
        return words
    noted = [piece[1:] for piece in pieces if piece[0] == target] + [piece[2:] for piece in own if piece[1] == target]
    noted += [words[3:]] if words[2:3] == [target] else [words[2:]] if words[1] == target else []
    values = next((code for code in noted if code and code[0] != "none"), ["none"])
    return [words[0], target, *values]


def draw_scene(rng: random.Random, sentences: int, kind: str = "") -> Scene:
    """A scene of any kind; every state of knowledge, and sections with and without news are frequent."""
    kind = kind or rng.choice(KINDS)
    name = rng.choice(NAMES)
    target = draw_name(rng, name) if kind == "link" else name
    before, facts, found = _DRAW[kind](rng, name, target)
    section = [
        draw_other(rng, kind, (name, target)) if rng.random() < OTHER_SHARE else draw_filler(rng) for _ in range(sentences)
    ]
    for place, fact in zip(sorted(rng.sample(range(sentences), len(facts))), facts, strict=True):
        section[place] = sentence(fact)
    return Scene(kind, name, target, before, tuple(found), tuple(section))


Drawn = tuple[str, list[Fact], list[str]]  # what is known before, the section's facts in their order, and what they say


def _draw_code(rng: random.Random, name: str, _: str) -> Drawn:
    known = rng.random() < 0.5
    before = f"{name} {draw_values(rng)}" if known else f"{name} none"
    facts, found = [], []
    if rng.random() < (0.35 if known else 0.6):
        found = [f"{name} {draw_values(rng)}"]
        facts = [code(found[0])]
    if rng.random() < 0.25:
        lookalike = Fact(rng.choice(("rumour", "plan", "not")), name, tuple(draw_values(rng).split()))
        facts.insert(rng.randint(0, len(facts)), lookalike)
    return before, facts, found


def _draw_link(rng: random.Random, name: str, target: str) -> Drawn:
    answer, chance, brings = f"{target} {draw_values(rng)}", rng.random(), rng.random() < 0.6
    link, linked, before = Fact("link", name, (target,)), f"{name} {target} none", f"{name} none"
    facts, found = [link], [linked]
    if chance < 0.2:
        return f"{name} {answer}", [], []
    if chance < 0.55:
        before, facts, found = linked, [code(answer)], [f"{name} {answer}"]
    elif chance < 0.7:  # a code was written down in case it is the right one
        noted = rng.choice([answer, f"{draw_name(rng, name)} {draw_values(rng)}"])
        before = f"{before} {noted}"
    elif brings and rng.random() < 0.35:  # both in one section, in either order
        facts, found = rng.sample([link, code(answer)], 2), [f"{name} {answer}"]
    return (before, facts, found) if brings else (before, [], [])


def _draw_pets(rng: random.Random, name: str, _: str) -> Drawn:
    pets, many = rng.sample(SECOND_VALUES, MOST_PETS), rng.randint(0, MOST_PETS)
    new = pets[many : many + rng.choice((0, 0, 1, 1, 1))]
    listed = [rng.choice(pets[:many])] if many and rng.random() < 0.2 else []
    facts = [Fact("pet", name, (pet,)) for pet in [*new, *listed]]
    return " ".join((name, *(pets[:many] or ["none"]))), rng.sample(facts, len(facts)), [f"{name} {pet}" for pet in new]


def _draw_visits(rng: random.Random, name: str, _: str) -> Drawn:
    many = rng.randint(0, MOST_VISITS - 1)
    new = min(rng.choice((0, 1, 1, 1, 2)), MOST_VISITS - many)
    facts = [Fact("visit", name, (rng.choice(PLACES),)) for _ in range(new)]
    return f"{name} {COUNTS[many]}", facts, [f"{name} {COUNTS[new]}"] if new else []


_DRAW = {"code": _draw_code, "link": _draw_link, "pet": _draw_pets, "visit": _draw_visits}


def code(piece: str) -> Fact:
    name, *values = piece.split()
    return Fact("code", name, tuple(values))


def draw_other(rng: random.Random, kind: str, names: Sequence[str]) -> str:
    """A sentence about a name that is none of `names`, of a kind that documents with this question have."""
    other = rng.choice(OTHERS[kind])
    while (name := rng.choice(NAMES)) in names:
        pass
    values = {"link": (rng.choice(NAMES),), "pet": (rng.choice(SECOND_VALUES),), "visit": (rng.choice(PLACES),)}
    return sentence(Fact(other, name, values.get(other) or tuple(draw_values(rng).split())))
