"""Needles in a haystack: statements about keys, hidden in text, of which the question asks for some (the niah tasks).

A hidden number of brave-otter is 4821973.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal

from memrl.data.paragraphs import draws
from memrl.data.ruler.draws import uuid
from memrl.data.ruler.fitting import Document
from memrl.data.ruler.haystack import Haystack
from memrl.data.ruler.task import Plan, Rng, SyntheticTask, listed
from memrl.data.ruler.words import NUM_WORDS, word
from memrl.tokenizer import Tokenizer

ANSWER_TOKENS = 128
_SMALLEST = 200  # characters of a window


@dataclass(frozen=True)
class NeedleKind:
    """
    Attributes:
        haystack: "noise" is one line repeated, "essays" the user's text, "needles" other needles.
        keys, values: what they are.
        num_keys: needles with a key of their own.
        num_values: needles of each key.
        num_asked: keys that the question names.
    """

    haystack: Literal["noise", "essays", "needles"]
    keys: Literal["words", "uuids"] = "words"
    values: Literal["numbers", "uuids"] = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_asked: int = 1


KINDS = {
    "niah_single_1": NeedleKind("noise"),
    "niah_single_2": NeedleKind("essays"),
    "niah_single_3": NeedleKind("essays", values="uuids"),
    "niah_multikey_1": NeedleKind("essays", num_keys=4),
    "niah_multikey_2": NeedleKind("needles"),
    "niah_multikey_3": NeedleKind("needles", keys="uuids", values="uuids"),
    "niah_multivalue": NeedleKind("essays", num_values=4),
    "niah_multiquery": NeedleKind("essays", num_keys=4, num_asked=4),
}


def statement(kind: NeedleKind, key: str, value: str) -> str:
    return f"A hidden {_type(kind)} of {key} is {value}."


class NeedleTask(SyntheticTask):
    """One of the niah tasks."""

    def __init__(self, name: str, tokenizer: Tokenizer, haystack: Haystack | None):
        """
        Args:
            haystack: None where it consists of other needles.
        """
        super().__init__(name, tokenizer, ANSWER_TOKENS, haystack.version if haystack else "needles")
        self.kind, self.haystack = KINDS[name], haystack

    def plan(self, length: int, rng: Rng) -> Plan:
        kind = self.kind
        keys = self._keys(rng("keys"), kind.num_keys)
        values = self._values(rng("values"), kind.num_keys * kind.num_values)
        pairs = [(key, values[i * kind.num_values + j]) for i, key in enumerate(keys) for j in range(kind.num_values)]
        asked = kind.num_asked * kind.num_values
        numbers = rng("shares")
        shares = [numbers.random() for _ in pairs]
        question = _question(kind, tuple(keys[: kind.num_asked]))
        match = "all" if asked > 1 else "any"
        if self.haystack is None:
            (key, value), (share,) = pairs[0], shares
            words = len(statement(kind, key, value).split())
            build = partial(self._among_needles, rng, share, words)
            return Plan(question, (value,), match, build, smallest=2 * words, step=32 * words)
        needles = [statement(kind, key, value) for key, value in pairs]
        start = self.haystack.start(rng("start").random())

        def hide(size: int) -> Document:
            context, places = self.haystack.hide(needles, shares, start, size)
            facts = {}
            if kind.haystack == "essays":
                facts = {"haystack_rounds": self.haystack.rounds(size)}
            if len(pairs) > asked:
                facts["other_depths"] = [place / len(context) for place in places[asked:]]
            return Document(context, tuple(places[:asked]), facts)

        return Plan(question, tuple(value for _, value in pairs[:asked]), match, hide, smallest=_SMALLEST, step=2000)

    def _among_needles(self, rng: Rng, share: float, words: int, units: int) -> Document:
        """The needle among others of together `units` words, each of which has `words`; the last one may break off."""
        num_others = -(-units // words)
        keys = self._keys(rng("keys"), num_others + 1)
        values = self._values(rng("values"), num_others + 1)
        lines = [statement(self.kind, key, value) for key, value in zip(keys, values, strict=True)]
        needle, others = lines[0], lines[1:]
        if units % words:
            others[-1] = " ".join(others[-1].split()[: units % words])
        place = int(share * (units // words + 1))
        before = sum(len(line) + 1 for line in others[:place])
        context = "\n".join([*others[:place], needle, *others[place:]])
        return Document(context, (before,))

    def _keys(self, rng: random.Random, number: int) -> list[str]:
        return self._take(_uuids(rng) if self.kind.keys == "uuids" else map(word, draws(rng, NUM_WORDS)), number)

    def _values(self, rng: random.Random, number: int) -> list[str]:
        """UUIDs, or whole numbers of seven digits."""
        numbers = (str(1_000_000 + place) for place in draws(rng, 9_000_000))
        return self._take(_uuids(rng) if self.kind.values == "uuids" else numbers, number)

    def _take(self, different: Iterable[str], number: int) -> list[str]:
        """The first so many that the haystack's own text does not hold; of the same ones, a smaller number gives the start."""
        text = self.haystack.text if self.haystack else ""
        taken = list(islice((one for one in different if one not in text), number))
        if len(taken) < number:
            raise ValueError(f"{self.name}: the length needs {number} keys, and there are {len(taken)}; give fewer tokens")
        return taken


def _uuids(rng: random.Random) -> Iterator[str]:
    while True:
        yield uuid(rng)


def _question(kind: NeedleKind, keys: tuple[str, ...]) -> str:
    type_, total = _type(kind), kind.num_asked * kind.num_values
    if total == 1:
        return f"What is the hidden {type_} of {keys[0]}? The text states it once. Answer with the {type_} alone."
    each = "The text states one of each." if kind.num_values == 1 else "The text states each in a place of its own."
    form = f"Answer with the {total} {type_}s, separated by commas."
    return f"What are the {total} hidden {type_}s of {listed(keys)}? {each} {form}"


def _type(kind: NeedleKind) -> str:
    return "number" if kind.values == "numbers" else "UUID"
