"""State tracking: people walk between places and handle objects, told in sentences hidden in another text.

Priya hurried off to the library. Priya collected the lantern. Where is the lantern now?

As BABILong (arXiv 2406.10149), which hides the stories of bAbI (arXiv 1502.05698) in books; of bAbI the tasks 1, 2, 3, 6, 7, 8.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memrl.data.ruler.draws import below, pick, pick_some
from memrl.data.ruler.fitting import Document
from memrl.data.ruler.haystack import NOISE, Haystack, read_essays
from memrl.data.ruler.task import Plan, Rng, SyntheticTask
from memrl.tokenizer import Tokenizer

FORMAT = "1"  # raised when the same arguments give another sample
PEOPLE = "Keiko Priya Tariq Oluchi Mateo Zanele Yusuf Leilani Bogdan Nkechi Hiroshi Farida Ximena Tomasz Anouk".split()
PLACES = "bakery library harbour stable greenhouse workshop museum lighthouse orchard station market attic".split()
OBJECTS = "lantern violin compass teapot umbrella telescope basket ladder kettle trumpet globe saddle".split()
SENTENCES = {
    "move": ("{} strolled over to the {}.", "{} hurried off to the {}.", "{} turned up at the {}.", "{} reached the {}."),
    "take": ("{} collected the {}.", "{} took hold of the {}.", "{} tucked the {} under one arm."),
    "drop": ("{} laid the {} aside.", "{} set the {} on the floor.", "{} left the {} standing there."),
    "give": ("{} passed the {} on to {}.", "{} entrusted the {} to {}."),
}
NUM_PEOPLE, NUM_PLACES = 4, 6  # of a story, as in bAbI
MOST_CARRIED = 3  # objects that the answer of "count" and "list" has at most
_LONGEST_SENTENCE, _LEAST_TEXT = 45, 200  # characters of a story's sentence and its space; of the other text
_RULE = "The text tells now and then who goes where and who has what. What somebody carries is where its carrier is."


class StoryKind(NamedTuple):
    """Fewest and most sentences of a story, its number of objects, and whether objects are handed over."""

    fewest: int
    most: int
    num_objects: int = 3
    gives: bool = False


KINDS = {
    "1": StoryKind(6, 12),
    "2": StoryKind(10, 30),
    "3": StoryKind(16, 40),
    "yes_no": StoryKind(6, 12),
    "count": StoryKind(16, 40, 6, True),
    "list": StoryKind(16, 40, 6, True),
}


class Asked(NamedTuple):
    """A question on a story, with the numbers of the sentences that the answer follows from."""

    question: str
    answers: tuple[str, ...]
    evidence: tuple[int, ...]


@dataclass
class Visit:
    """A stay of an object at a place: the two events that show how it got there, and the two last ones that show it there."""

    place: str
    arrival: tuple[int, ...]
    last: tuple[int, ...]


@dataclass
class World:
    """A story and what is known after it.

    Attributes:
        events: kind, person, place or object, receiver of what is given.
        moves: the numbers of each person's moves.
        held: each carried object's carrier, and the event that made it so.
        handled: the last event in which each person took, dropped, gave or received something.
        visits: each object's stays, from where it is taken first.
    """

    people: Sequence[str]
    objects: Sequence[str]
    lying: dict[str, str]
    events: list[tuple[str, ...]] = field(default_factory=list)
    moves: dict[str, list[int]] = field(default_factory=dict)
    held: dict[str, tuple[str, int]] = field(default_factory=dict)
    handled: dict[str, int] = field(default_factory=dict)
    visits: dict[str, list[Visit]] = field(default_factory=dict)

    def place(self, person: str, back: int = 1) -> str | None:
        """Where a person is, or with `back` 2 was before; None if the story does not say."""
        moves = self.moves.get(person, [])
        return self.events[moves[-back]][2] if len(moves) >= back else None

    def carried(self, person: str) -> list[str]:
        return [thing for thing, (carrier, _) in self.held.items() if carrier == person]

    def choices(self, person: str, gives: bool) -> list[tuple[str, ...]]:
        """What a person can do besides walking: only where the story has said where they are."""
        place = self.place(person)
        if place is None:
            return []
        found = [("take", person, thing) for thing in self.objects if self.lying.get(thing) == place]
        for thing in self.carried(person):
            found.append(("drop", person, thing))
            near = [other for other in self.people if other != person and self.place(other) == place]
            found += [("give", person, thing, other) for other in near if gives]
        return found

    def add(self, event: tuple[str, ...]) -> None:
        kind, person, what, *receiver = event
        number = len(self.events)
        self.events.append(event)
        if kind == "move":
            self.moves.setdefault(person, []).append(number)
            for thing in self.carried(person):
                why = (self.held[thing][1], number)
                self.visits[thing].append(Visit(what, why, why))
            return
        place, why = str(self.place(person)), (self.moves[person][-1], number)
        if kind == "drop":
            del self.held[what]
            self.lying[what] = place
        else:
            self.held[what] = (receiver[0] if receiver else person, number)
            self.lying.pop(what, None)
        for one in (person, *receiver):
            self.handled[one] = number
        if self.visits.get(what):
            self.visits[what][-1].last = why
        else:
            self.visits[what] = [Visit(place, why, why)]


def tell(rng: random.Random, people: list[str], kind: StoryKind) -> World:
    """A random story: each event is a walk or, half of the time if there is a choice, something done with an object."""
    places, objects = pick_some(rng, PLACES, NUM_PLACES), pick_some(rng, OBJECTS, kind.num_objects)
    world = World(pick_some(rng, people, NUM_PEOPLE), objects, {thing: pick(rng, places) for thing in objects})
    for _ in range(kind.fewest + below(rng, kind.most - kind.fewest + 1)):
        person = pick(rng, world.people)
        choices = world.choices(person, kind.gives)
        if choices and below(rng, 2):
            world.add(pick(rng, choices))
        else:
            world.add(("move", person, pick(rng, [place for place in places if place != world.place(person)])))
    return world


def questions(world: World, kind: str, wanted: int) -> Iterator[Asked]:
    """All questions of a kind that the story answers. `wanted`: for yes_no whether yes, for count and list how many."""
    if kind == "1":
        for person, moves in world.moves.items():
            yield Asked(f"Where is {person} now?", (str(world.place(person)),), (moves[-1],))
    elif kind == "2":
        for thing, visits in world.visits.items():
            yield Asked(f"Where is the {thing} now?", (visits[-1].place,), visits[-1].last)
    elif kind == "3":
        for thing, visits in world.visits.items():
            if [visit.place for visit in visits].count(visits[-1].place) == 1 < len(visits):
                evidence = sorted({*visits[-2].last, *visits[-1].arrival})
                question = f"Where was the {thing} just before it came to the {visits[-1].place}?"
                yield Asked(question, (visits[-2].place,), tuple(evidence))
    elif kind == "yes_no":
        for person, moves in world.moves.items():
            if len(moves) > 1:  # a wrong place is one where the person has been, or any sentence with both would mean yes
                place = world.place(person, 1 if wanted else 2)
                yield Asked(f"Is {person} in or at the {place} now?", ("yes" if wanted else "no",), (moves[-1],))
    else:
        for person in world.handled:
            things = world.carried(person)
            evidence = tuple(world.held[thing][1] for thing in things) or (world.handled[person],)
            if len(things) == wanted and kind == "count":
                yield Asked(f"How many objects does {person} carry now?", (str(wanted),), evidence)
            elif len(things) == wanted:
                yield Asked(f"What does {person} carry now?", tuple(things) or ("nothing",), evidence)


FORMS = {
    **dict.fromkeys("123", "Answer with the place alone."),
    "yes_no": "Answer with yes or no.",
    "count": "Answer with the number in digits.",
    "list": "Answer with the objects, separated by commas, or with nothing.",
}


def chance(world: World, kind: str) -> float:
    """The share that a guess among the candidates gets: yes or no, 0 to MOST_CARRIED objects, or the places that the story names.

    The place that a question of kind 3 names is none. Of the lists, "nothing" is right as often as any number of objects.
    """
    if kind in "123":
        return 1 / (len({event[2] for event in world.events if event[0] == "move"}) - (kind == "3"))
    return 1 / 2 if kind == "yes_no" else 1 / (MOST_CARRIED + 1)


class StateTracking(SyntheticTask):
    """One of the six kinds of questions.

    Raises:
        ValueError: `essays`, a path, cannot be read, or its text names too many of the people.
    """

    answer_tokens = 32
    format = FORMAT

    def __init__(self, name: str, tokenizer: Tokenizer, essays: str | None):
        self.kind = name.removeprefix("state_tracking_")
        self.haystack = read_essays(essays) if essays else Haystack(NOISE, " ", "noise")
        self.source = "essays" if essays else "noise"
        self.people = [person for person in PEOPLE if person not in self.haystack.text]
        if len(self.people) < NUM_PEOPLE:
            raise ValueError(f"--essays {essays}: the text names nearly all of {', '.join(PEOPLE)}; give another text")
        super().__init__(name, tokenizer, self.haystack.version)

    def plan(self, length: int, rng: Rng) -> Plan:
        wanted = below(rng("wanted"), 2 if self.kind == "yes_no" else MOST_CARRIED + 1)
        world, found = self._story(rng("story"), wanted)
        asked = pick(rng("question"), found)
        words = rng("words")
        sentences = [pick(words, SENTENCES[event[0]]).format(*event[1:]) for event in world.events]
        shares = rng("shares")
        places = sorted(shares.random() for _ in sentences)
        start = self.haystack.start(rng("start").random())

        def hide(size: int) -> Document:
            context, found = self.haystack.hide(sentences, places, start, size)
            facts = {"chance": chance(world, self.kind), "sentences": len(sentences), "haystack": self.source}
            facts["haystack_rounds"] = self.haystack.rounds(size)
            return Document(context, tuple(found[number] for number in sorted(asked.evidence)), facts)

        # A shorter story has more other text, so that all samples of a kind need about the same length.
        smallest = KINDS[self.kind].most * _LONGEST_SENTENCE - sum(len(sentence) + 1 for sentence in sentences) + _LEAST_TEXT
        match = "all" if len(asked.answers) > 1 else "any"
        return Plan(f"{_RULE} {asked.question} {FORMS[self.kind]}", asked.answers, match, hide, smallest, step=2000)

    def _story(self, rng: random.Random, wanted: int) -> tuple[World, list[Asked]]:
        """The first random story that answers a question of the kind, and all such questions."""
        while True:
            world = tell(rng, self.people, KINDS[self.kind])
            found = list(questions(world, self.kind, wanted))
            if found:
                return world, found
