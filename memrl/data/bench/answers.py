"""Answer the bench's questions: from the document's text (oracle), or without it (chance)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from memrl.data.bench import english, miniature
from memrl.data.bench.stories import NEEDED, Draws
from memrl.data.needle import FIRST_VALUES, NAMES, SECOND_VALUES


def oracle_answer(question: str, context: str) -> str:
    """The right answer, in a box; uses nothing but the two texts.

    Raises:
        ValueError: it is no question of the bench, or the document has no fact about it.
    """
    language, (kind, name) = _read(question)
    facts = language.read_facts(context)
    codes = {fact.name: " ".join(fact.values) for fact in facts if fact.kind == "code"}  # a later code replaces an earlier one
    about = [fact for fact in facts if (fact.kind, fact.name) == (kind, name)]
    subject = about[-1].values[0] if about and kind == "link" else name
    if not about or (kind == "link" and subject not in codes):
        raise ValueError(f"the document does not answer {question!r}")
    if kind == "pet":
        return _boxed(language, "", [fact.values[0] for fact in about])
    return _boxed(language, subject, [len(about) if kind == "visit" else codes[subject]])


def chance_answer(question: str, rng: random.Random) -> str:
    """An answer of the right form that is drawn without the document, in a box; ValueError if it is no question of the bench."""
    language, (kind, name) = _read(question)
    draws = Draws(rng)
    if kind == "pet":
        return _boxed(language, "", rng.sample(SECOND_VALUES, rng.randint(*NEEDED["listing"])))
    subject = draws.name(name) if kind == "link" else name
    return _boxed(language, subject, [rng.randint(*NEEDED["counting"]) if kind == "visit" else " ".join(draws.code())])


def chance(task: str, language: str = "miniature") -> float:
    """The probability that `chance_answer` is right: one over the number of answers; of lists, the mean over their lengths."""
    if task == "counting":
        low, high = NEEDED[task]
        return 1 / (high - low + 1)
    if task == "listing":
        low, high = NEEDED[task]
        return sum(1 / math.comb(len(SECOND_VALUES), size) for size in range(low, high + 1)) / (high - low + 1) ** 2
    names = len(NAMES) - 1 if (task, language) == ("two_hop", "miniature") else 1
    return 1 / (names * len(FIRST_VALUES) * len(SECOND_VALUES))


def _read(question: str):
    """The language of a question, and the kind and name that it asks for."""
    for language in (miniature, english):
        if asked := language.read_question(question):
            return language, asked
    raise ValueError(f"{question!r} is no question of the bench")


def _boxed(language, subject: str, values: Sequence[str | int]) -> str:
    return f"\\boxed{{{language.spell(subject, values)}}}"
