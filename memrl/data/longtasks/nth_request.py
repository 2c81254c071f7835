"""The n-th request: a long conversation in which a user asks again and again for pieces of writing; repeat the n-th of one kind.

User: Write a riddle about the otter.
Assistant: No brave teapot envied the amber lantern at noon. One spry meadow found the blond globe.

As MRCR (Michelangelo, arXiv 2409.12640, and OpenAI's data set of 2, 4 or 8 equal requests).
"""

import random
from collections.abc import Iterator

from memrl.data.ruler.draws import Endless, below, pick, pick_some
from memrl.data.ruler.fitting import Document
from memrl.data.ruler.task import Plan, Rng, SyntheticTask
from memrl.data.ruler.words import ADJECTIVES, NOUNS

FORMAT = "1"  # raised when the same arguments give another sample
FORMATS = "riddle;toast;slogan;fable;diary entry;weather report;love letter;speech;recipe;ghost story".split(";")
ORDINALS = "first second third fourth fifth sixth seventh eighth".split()
NUM_TOPICS = 12  # of a conversation; so one other request in 21 is about the same topic, and one in 12 asks for the same format
LONGEST = 5  # sentences of a piece, at least 2
_OPENINGS = "The One No Some".split()
_VERBS = "envied painted borrowed forgot admired followed carried sold feared found washed greeted".split()
_ENDS = ("", " at noon", " in the rain", " without a word", " once more", " before dawn")

Pair = tuple[str, str]


def _pair(rng: random.Random) -> Pair:
    return pick(rng, ADJECTIVES), pick(rng, NOUNS)


def _sentence(rng: random.Random, subject: Pair) -> str:
    return f"{pick(rng, _OPENINGS)} {' '.join(subject)} {pick(rng, _VERBS)} the {' '.join(_pair(rng))}{pick(rng, _ENDS)}."


def _other(rng: random.Random, taken: set[Pair]) -> str:
    """A sentence about none of the pairs that are taken."""
    subject = _pair(rng)
    while subject in taken:
        subject = _pair(rng)
    return _sentence(rng, subject)


def _turns(kind: str, topic: str, sentence: str) -> str:
    """A request and the first sentence of the answer."""
    return f"\n\nUser: Write a {kind} about the {topic}.\nAssistant: {sentence}"


class NthRequest(SyntheticTask):
    """A conversation with 2, 4 or 8 equal requests among others; the units are sentences of the other answers."""

    answer_tokens = 64
    format = FORMAT

    def plan(self, length: int, rng: Rng) -> Plan:
        number = int(self.name.rpartition("_")[2])
        asked = below(rng("asked"), number)
        kind, topics = pick(rng("format"), FORMATS), pick_some(rng("topics"), NOUNS, NUM_TOPICS)
        words = rng("needles")
        subjects: dict[Pair, None] = {}
        while len(subjects) < number:
            subjects.setdefault(_pair(words))
        taken = set(subjects)
        firsts = [_sentence(words, subject) for subject in subjects]
        rests = [[_other(words, taken) for _ in range(1 + below(words, LONGEST - 1))] for _ in firsts]
        needles = [" ".join((_turns(kind, topics[0], one), *rest)) for one, rest in zip(firsts, rests, strict=True)]
        numbers = rng("shares")
        shares = sorted(numbers.random() for _ in needles)
        others = Endless(self._others(rng("others"), (kind, topics[0]), topics, taken))

        def build(units: int) -> Document:
            context, begins = _insert(others.first(units), needles, shares)
            depths = [place / len(context) for place in begins]
            facts = {"chance": 1 / number, "asked": asked + 1, "other_depths": depths[:asked] + depths[asked + 1 :]}
            return Document(context, (begins[asked],), facts)

        question = (
            f"The text is a conversation. What is the first sentence of its {ORDINALS[asked]} {kind} about the {topics[0]}? "
            "Repeat the sentence word for word."
        )
        # Shorter answers leave room for more others, so that all samples need about the same length.
        smallest = number * LONGEST - sum(1 + len(rest) for rest in rests) + 4 * LONGEST
        answers = firsts[asked], firsts[asked].rstrip(".")
        return Plan(question, answers, "any", build, smallest, step=40)

    @staticmethod
    def _others(rng: random.Random, asked: tuple[str, str], topics: list[str], taken: set[Pair]) -> Iterator[str]:
        """Sentences of the answers to all other requests; with an answer's first one comes its request."""
        while True:
            request = pick(rng, FORMATS), pick(rng, topics)
            if request == asked:
                continue
            yield _turns(*request, _other(rng, taken))
            for _ in range(1 + below(rng, LONGEST - 1)):
                yield f" {_other(rng, taken)}"


def _insert(lines: list[str], needles: list[str], shares: list[float]) -> tuple[str, list[int]]:
    """The conversation, and where the answers of the needles begin. Needles stand between other answers, in ascending shares."""
    edges = [number for number, line in enumerate(lines) if line.startswith("\n")] + [len(lines)]
    parts, places, length, last = list[str](), list[int](), 0, 0
    for needle, share in zip(needles, shares, strict=True):
        edge = edges[int(share * len(edges))]
        before = "".join(lines[last:edge])
        places.append(length + len(before) + needle.index("Assistant: ") + len("Assistant: "))
        parts += [before, needle]
        length, last = length + len(before) + len(needle), edge
    text = "".join([*parts, *lines[last:]])
    body = text.lstrip()
    return body, [place - (len(text) - len(body)) for place in places]
