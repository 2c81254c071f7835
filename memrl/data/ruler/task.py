"""What the eleven synthetic tasks share: from (length, index, seed) to a sample of that many tokens."""

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

RESERVE = 128  # tokens kept free for a prompt's own words and its chat template; ours take 65 with Qwen2.5's
FORMAT = "1"  # raised whenever the same arguments come to mean another sample
_MARGIN = 1.125  # another sample's random words may take more tokens

Rng = Callable[[str], random.Random]


@dataclass(frozen=True)
class Plan:
    """A sample before its length is known: all that does not depend on how much text there is.

    Attributes:
        question, answers, match: as in `memrl.types.Sample`.
        build: the document of a number of units, a pure function.
        smallest: the fewest units that make sense.
        step: so many units more tell what a unit takes.
    """

    question: str
    answers: tuple[str, ...]
    match: str
    build: Callable[[int], Document]
    smallest: int
    step: int


class SyntheticTask(ABC):
    """A task of which every sample is made up.

    Attributes:
        name: of the task, one of `memrl.data.ruler.TASKS`.
        answer_tokens: the budget of the answer, which the length includes.
        num_questions: None: there is no end of them.
        version: changes when the same arguments to `sample` mean another sample.
    """

    num_questions: int | None = None

    def __init__(self, name: str, tokenizer: Tokenizer, answer_tokens: int, haystack: str = ""):
        """
        Args:
            haystack: the version of the haystack, where the task has one.
        """
        self.name, self.tokenizer, self.answer_tokens = name, tokenizer, answer_tokens
        parts = "\n".join((FORMAT, name, str(RESERVE), haystack, _tokenizer_version(tokenizer)))
        self.version = f"{FORMAT}-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"

    @abstractmethod
    def plan(self, length: int, rng: Rng) -> Plan:
        """
        Args:
            length: what the sample may take in all, tokens.
            rng: a generator of its own for every purpose, by name; the same name gives the same numbers again.
        """

    def sample(self, length: int, index: int, seed: int) -> Sample:
        """The sample number `index` of this length, a pure function of the arguments.

        Args:
            length: at most this is tokens(context) + tokens(question) + `answer_tokens` + RESERVE, and from 4,096 on at least 99%
                of it, where the tokenizer needs no more than some 40 tokens for a line of a task.

        Raises:
            ValueError: the length does not hold the smallest document, or holds more than the task has words for.
        """
        plan = self.plan(length, lambda part: random.Random(sample_seed(seed, self.name, length, index, part)))
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
            answers=plan.answers,
            match=plan.match,
            metadata={"task": self.name, "length": length, "tokens": tokens, "depths": depths, **document.facts},
        )

    def _count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))


def listed(names: tuple[str, ...]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _tokenizer_version(tokenizer: Tokenizer) -> str:
    """How the tokenizer splits text: equal for equal ones, whatever library wrote their files."""
    words = f"{' '.join(ADJECTIVES)}-{' '.join(NOUNS)}"
    probe = f"{NOISE} {words} LET QXJZV = 1029384756 9f8e7d6c-5b4a\n12. it's caf\u00e9, \u6771\u4eac!"
    return hashlib.sha256(repr((tokenizer.vocab_size, tokenizer.encode(probe))).encode()).hexdigest()
