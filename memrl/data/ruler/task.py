"""The base of all tasks, and of the eleven synthetic ones: make a sample of a number of tokens from (length, index, seed)."""

import hashlib
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from memrl.data.paragraphs import sample_seed
from memrl.data.ruler.fitting import Document, TooShort, fit
from memrl.data.ruler.haystack import NOISE
from memrl.data.ruler.words import ADJECTIVES, NOUNS
from memrl.tokenizer import Tokenizer
from memrl.types import Sample

RESERVE = 128  # tokens for the words of the prompt and its chat template; the default prompt takes 65 with Qwen2.5's
FORMAT = "1"  # raised when the same arguments give another sample
_MARGIN = 1.125  # the random words of another sample may have more tokens

Rng = Callable[[str], random.Random]


@dataclass(frozen=True)
class Plan:
    """The parts of a sample that do not depend on its length.

    Attributes:
        question, answers, match: as in `memrl.types.Sample`; a document's own answers replace `answers`.
        build: the document of a number of units, a pure function.
        smallest: the fewest units of a document.
        step: as in `fit`.
    """

    question: str
    answers: tuple[str, ...]
    match: str
    build: Callable[[int], Document]
    smallest: int
    step: int


class RulerTask(ABC):
    """
    Attributes:
        version: changes when the same arguments to `sample` give another sample; depends on the contents of the files.
        answer_tokens: RULER's budget of the answer, which the length includes.
    """

    name: str
    version: str
    answer_tokens: int

    @property
    def num_questions(self) -> int | None:
        """Number of different questions; None for synthetic tasks."""
        return None

    def check(self, length: int) -> None:
        """Raise ValueError if the task has too little text for samples of this length; synthetic tasks generate theirs."""
        return

    @abstractmethod
    def sample(self, length: int, index: int, seed: int) -> Sample:
        """Sample number `index` of this length: a pure function of the arguments and the files.

        tokens(context) + tokens(question) + answer_tokens + RESERVE <= length, and from 4,096 on at least 99% of it, if the
        tokenizer needs at most about 40 tokens for a line of a synthetic task, or if the paragraphs of the files allow it.

        Raises:
            ValueError: no such question, or the length is too short or too long for the task.
        """


class SyntheticTask(RulerTask):
    """A task whose samples are made from random words and numbers."""

    format = FORMAT

    def __init__(self, name: str, tokenizer: Tokenizer, haystack: str = ""):
        """
        Args:
            haystack: version of the haystack, if the task has one.
        """
        self.name, self.tokenizer = name, tokenizer
        parts = "\n".join((self.format, name, str(RESERVE), haystack, _tokenizer_version(tokenizer)))
        self.version = f"{self.format}-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"

    @abstractmethod
    def plan(self, length: int, rng: Rng) -> Plan:
        """
        Args:
            length: tokens of the whole sample.
            rng: gives a generator for each purpose, by name; the same name gives the same numbers again.
        """

    def sample(self, length: int, index: int, seed: int) -> Sample:
        plan = self.plan(length, lambda part: random.Random(sample_seed(seed, self.name, length, index, part)))
        return self.fill(plan, length, index, seed)

    def fill(self, plan: Plan, length: int, index: int, seed: int) -> Sample:
        """The sample of a plan."""
        question = self._count(plan.question)
        others = question + self.answer_tokens + RESERVE
        try:
            document, context = fit(plan.build, self._count, length - others, plan.smallest, plan.step)
        except TooShort as error:
            needed = 32 * math.ceil((_MARGIN * error.tokens + others) / 32)
            raise ValueError(f"{self.name}: a length of {length} tokens is too short; give {needed} or more") from None
        tokens = {"context": context, "question": question, "answer_budget": self.answer_tokens, "reserve": RESERVE}
        depths = [place / len(document.context) for place in document.places]
        return Sample(
            id=f"{self.name}-{length}-{seed}-{index}",
            question=plan.question,
            context=document.context,
            answers=plan.answers if document.answers is None else document.answers,
            match=plan.match,
            metadata={"task": self.name, "length": length, "tokens": tokens, "depths": depths, **document.facts},
        )

    def _count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))


def listed(names: tuple[str, ...]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _tokenizer_version(tokenizer: Tokenizer) -> str:
    """A hash of how the tokenizer splits text; equal for equal tokenizers, whichever library wrote their files."""
    words = f"{' '.join(ADJECTIVES)}-{' '.join(NOUNS)}"
    probe = f"{NOISE} {words} LET QXJZV = 1029384756 9f8e7d6c-5b4a\n12. it's caf\u00e9, \u6771\u4eac!"
    return hashlib.sha256(repr((tokenizer.vocab_size, tokenizer.encode(probe))).encode()).hexdigest()
