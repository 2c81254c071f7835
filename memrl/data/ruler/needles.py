"""Needles in a haystack: hide statements about keys in a text and ask for some of them (the niah tasks).

A hidden number of brave-otter is 4821973.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

from memrl.data.paragraphs import draws
from memrl.data.ruler.draws import uuid
from memrl.data.ruler.fitting import Document
from memrl.data.ruler.haystack import NOISE, Haystack, read_essays
from memrl.data.ruler.task import Plan, Rng, SyntheticTask, listed
from memrl.data.ruler.words import NUM_WORDS, word
from memrl.tokenizer import Tokenizer

_SMALLEST = 200  # characters of a window


@dataclass(frozen=True)
class NeedleKind:
    """
    Attributes:
        haystack: "noise" is one line repeated, "essays" the user's text, "needles" other needles.
        keys, values: their type.
        num_keys: number of different keys.
        num_values: needles per key.
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


class NiahTask(SyntheticTask):
    """One of the niah tasks.

    Raises:
        ValueError: the task needs `essays`, a path, and there is no text.
    """

    answer_tokens = 128

    def __init__(self, name: str, tokenizer: Tokenizer, essays: str | None):
        self.kind = KINDS[name]
        self.haystack: Haystack | None = None
        if self.kind.haystack == "noise":
            self.haystack = Haystack(NOISE, "\n", "noise")
        elif self.kind.haystack == "essays":
            if not essays:
                raise ValueError(f"{name} hides its needles in a text of yours; give --essays FOLDER, a folder of .txt files")
            self.haystack = read_essays(essays)
        super().__init__(name, tokenizer, self.haystack.version if self.haystack else "needles")

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
        haystack = self.haystack
        if haystack is None:
            (key, value), (share,) = pairs[0], shares
            words = len(statement(kind, key, value).split())
            build = partial(self._among_needles, rng, share, words)
            return Plan(question, (value,), match, build, smallest=2 * words, step=32 * words)
        needles = [statement(kind, key, value) for key, value in pairs]
        start = haystack.start(rng("start").random())

        def hide(size: int) -> Document:
            context, places = haystack.hide(needles, shares, start, size)
            facts: dict[str, Any] = {}
            if kind.haystack == "essays":
                facts["haystack_rounds"] = haystack.rounds(size)
            if len(pairs) > asked:
                facts["other_depths"] = [place / len(context) for place in places[asked:]]
            return Document(context, tuple(places[:asked]), facts)

        return Plan(question, tuple(value for _, value in pairs[:asked]), match, hide, smallest=_SMALLEST, step=2000)

    def _among_needles(self, rng: Rng, share: float, words: int, units: int) -> Document:
        """The needle among other needles with `units` words in total, `words` each; the last one may be cut."""
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

    def _take(self, candidates: Iterable[str], number: int) -> list[str]:
        """The first `number` candidates that are absent from the haystack's own text; a smaller number gives their start."""
        text = self.haystack.text if self.haystack else ""
        taken = list(islice((one for one in candidates if one not in text), number))
        if len(taken) < number:
            raise ValueError(f"{self.name}: the length needs {number} keys, and there are only {len(taken)}; give fewer tokens")
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
