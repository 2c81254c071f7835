"""Aggregation: a list of entries with dates and users; count them, find the most frequent kind, compare two kinds.

14 March | user 417 | The neighbour repaid the bank loan.

As OOLONG-synth (arXiv 2511.02817): the subject of an entry is not written next to it, and every entry counts.
"""

import random
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from memrl.data.ruler.draws import Endless, below, pick, pick_some
from memrl.data.ruler.fitting import Document
from memrl.data.ruler.task import Plan, Rng, SyntheticTask

FORMAT = "1"  # raised when the same arguments give another sample
PEOPLE = "The neighbour;My sister;Our teacher;The captain;An old friend;The twins;My uncle;The postman".split(";")
# Each subject's verbs and things; a thing belongs to one subject only.
SUBJECTS = {
    "food": ("cooked;burnt;ordered;praised", "the onion soup;a mushroom omelette;the apple pie;some lentil stew;the fish pasta"),
    "sport": ("won;lost;watched;missed", "the football final;a tennis match;the relay race;a boxing bout;the rowing regatta"),
    "music": ("played;rehearsed;recorded;hummed", "a violin sonata;the cello suite;a piano waltz;the jazz ballad;a drum solo"),
    "travel": (
        "booked;cancelled;planned;enjoyed",
        "the flight abroad;a night train;the ferry trip;a bus tour;the sea cruise",
    ),
    "gardening": ("watered;pruned;planted;fenced in", "the rose bushes;a hedge;the flower bed;some tulips;the vegetable patch"),
    "money": ("repaid;checked;refused;renewed", "the bank loan;a savings account;the tax bill;a mortgage;the credit card"),
}
LABELS = list(SUBJECTS)
MONTHS = "January February March April May June July August September October November December".split()
NUM_USERS, NUM_FREQUENT, FREQUENT_SHARE = 20, 4, 0.8  # four fifths of the entries are by a fifth of the users, as in OOLONG
HALF = 6  # months; each half of the year has its own frequencies
MOST_WEIGHT = 6
SMALLEST = 40  # entries
_RULE = f"Each line has a date, a user and an entry. Each entry is about one of {len(LABELS)} subjects: {', '.join(LABELS)}."


class Entry(NamedTuple):
    month: int
    user: int
    label: str
    text: str


class Scope(NamedTuple):
    """The entries that a question is about: all, those of a user or those of a month."""

    words: str
    user: int | None = None
    month: int | None = None

    def holds(self, entry: Entry) -> bool:
        return self.user in (None, entry.user) and self.month in (None, entry.month)


def entries(rng: random.Random, users: list[int], scope: Scope, label: str) -> Iterator[Entry]:
    """Entries without end. One of the first SMALLEST is about the label and in the scope, so that no count is 0."""
    halves = [[1 + below(rng, MOST_WEIGHT) for _ in LABELS] for _ in range(2)]  # weights of the labels in each half-year
    urns = [[one for one, weight in zip(LABELS, weights, strict=True) for _ in range(weight)] for weights in halves]
    certain, number = below(rng, SMALLEST), 0
    while True:
        is_certain = number == certain
        month = below(rng, len(MONTHS))
        month = scope.month if is_certain and scope.month is not None else month
        user = pick(rng, users[:NUM_FREQUENT] if rng.random() < FREQUENT_SHARE else users[NUM_FREQUENT:])
        user = scope.user if is_certain and scope.user is not None else user
        drawn = pick(rng, urns[month // HALF])
        about = label if is_certain else drawn
        verbs, things = (part.split(";") for part in SUBJECTS[about])
        text = f"{pick(rng, PEOPLE)} {pick(rng, verbs)} {pick(rng, things)}."
        yield Entry(month, user, about, f"{1 + below(rng, 28)} {MONTHS[month]} | user {user} | {text}")
        number += 1


def most(counts: Counter) -> tuple[str, ...]:
    """All keys with the highest count."""
    highest = max(counts.values())
    return tuple(str(key) for key, count in counts.items() if count == highest)


def compare(one: int, other: int, words: tuple[str, str]) -> tuple[str, ...]:
    """The first word if there are more of one, the second if there are more of the other, or "equal"."""
    return ("equal" if one == other else words[one < other],)


class Aggregation(SyntheticTask):
    """count, most or compare; the units are entries, and the answer depends on all of them."""

    answer_tokens = 32
    format = FORMAT

    def plan(self, length: int, rng: Rng) -> Plan:
        kind, numbers = self.name.rpartition("_")[2], rng("question")
        users = [100 + number for number in pick_some(rng("users"), range(900), NUM_USERS)]
        user, month = pick(numbers, users[:NUM_FREQUENT]), below(numbers, len(MONTHS))
        whole, one_user = Scope("Of all entries"), Scope(f"Of the entries of user {user}", user=user)
        scope = pick(numbers, (whole, one_user, Scope(f"Of the entries in {MONTHS[month]}", month=month)))
        label, other = pick_some(numbers, LABELS, 2)
        is_plain = kind == "count" or bool(
            below(numbers, 2)
        )  # the other variant of "most" asks for users, of "compare" for times
        scope = scope if is_plain else whole
        stream = Endless(entries(rng("entries"), users, scope, label))
        question = _question(kind, is_plain, scope.words, label, other)

        def build(units: int) -> Document:
            made = stream.first(units)
            inside = [entry for entry in made if scope.holds(entry)]
            answers, chance = _answer(kind, is_plain, inside, label, other)
            facts = {"chance": chance, "entries": len(made), "entries_asked": len(inside)}
            return Document("\n".join(entry.text for entry in made), (), facts, answers)

        return Plan(f"{_RULE} {question}", (), "any", build, SMALLEST, step=40)


def _question(kind: str, is_plain: bool, scope: str, label: str, other: str) -> str:
    if kind == "count":
        return f"{scope}, how many are about {label}? Answer with the number in digits."
    tie = "If several are equal, name one of them."
    if kind == "most":
        if is_plain:
            return f"{scope}, which subject do the most have? {tie} Answer with the subject alone."
        return f"{scope}, which user has the most that are about {label}? {tie} Answer with the user's number alone."
    if is_plain:
        ask = f"{scope}, are those about {label} more than, fewer than or equal to those about {other}?"
        return f"{ask} Answer with more, fewer or equal."
    days = f"up to the end of {MONTHS[HALF - 1]} or from {MONTHS[HALF]} on"
    return f"{scope}, are there more about {label} {days}, or equally many? Answer with earlier, later or equal."


def _answer(kind: str, is_plain: bool, inside: list[Entry], label: str, other: str) -> tuple[tuple[str, ...], float]:
    """The right answers, and the share that the best guess gets without the entries, see docs/long_tasks.md."""
    labels = Counter(entry.label for entry in inside)
    if kind == "count":
        return (str(labels[label]),), 1 / len(inside)
    if kind == "most":
        found = most(labels if is_plain else Counter(entry.user for entry in inside if entry.label == label))
        return found, len(found) / (len(LABELS) if is_plain else NUM_FREQUENT)
    if is_plain:
        return compare(labels[label], labels[other], ("more", "fewer")), 1 / 2
    early = sum(entry.label == label and entry.month < HALF for entry in inside)
    return compare(early, labels[label] - early, ("earlier", "later")), 1 / 2
