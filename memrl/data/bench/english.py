"""The bench in English: facts in prose, in documents of an exact number of tokens of any tokenizer, as RULER's.

The code of Irene Hill is purple falcon. It is rumoured that the code of Irene Hill is happy badger. There are plans to make red
fox the code of Irene Hill. The code of Irene Hill is not grey owl. Irene Hill uses the code of Simon Wood. Irene Hill keeps a
pet otter. Irene Hill visited the market again.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from memrl.data.bench.stories import NUM_VARIATIONS, STORIES, Draws, Fact, Variation, vary
from memrl.data.needle import NAMES
from memrl.data.paragraphs import sample_seed
from memrl.data.ruler.fitting import Document
from memrl.data.ruler.haystack import NOISE, Haystack, read_essays
from memrl.data.ruler.task import RESERVE, Plan, Rng, SyntheticTask
from memrl.tokenizer import Tokenizer
from memrl.types import Sample

SURNAMES = (
    "Archer Baker Carter Draper Fisher Fletcher Gardner Harper Hill Hunter Marsh Mason Miller Palmer Parker Potter Sawyer "
    "Shepherd Slater Taylor Turner Walker Weaver Wood"
).split()
FORMAT = "1"  # raised when the same arguments give another sample
_SMALLEST = 200  # characters of prose
_MARGIN = 0.15  # share of a chunk at both ends that a fact of two_hop keeps away from, since its place is not exact
_FORMS = {
    "code": "The code of {} is {} {}.",
    "rumour": "It is rumoured that the code of {} is {} {}.",
    "plan": "There are plans to give {} the code {} {}.",
    "not": "The code of {} is not {} {}.",
    "link": "{} uses the code of {}.",
    "pet": "{} keeps a pet {}.",
    "visit": "{} visited the {} again.",
}
_QUESTIONS = {
    "code": "What is the code of {}? If the text gives it several times, the last one counts. Answer with the code alone.",
    "link": "What is the code that {} uses? Answer with the code alone.",
    "pet": "Which pets does {} keep? Answer with all of them, separated by commas.",
    "visit": "How many times did {} visit a place, according to the text? Answer with the number alone.",
}
_NAME, _WORD = r"([A-Z][a-z]+ [A-Z][a-z]+)", r"([a-z]+)"


def _pattern(kind: str, form: str) -> re.Pattern[str]:
    """The form with a group for each slot: a name first, and a second one for a link."""
    parts = re.split(r"\{\}", form)
    slots = [_NAME] + [_NAME if kind == "link" else _WORD] * (len(parts) - 2)
    return re.compile("".join(re.escape(part) + slot for part, slot in zip(parts, [*slots, ""], strict=True)))


_PATTERNS = {kind: _pattern(kind, form) for kind, form in _FORMS.items()}
_ASKED = {kind: re.compile(re.escape(form).replace(r"\{\}", _NAME)) for kind, form in _QUESTIONS.items()}


def draw_name(rng: random.Random) -> str:
    return f"{rng.choice(NAMES).capitalize()} {rng.choice(SURNAMES)}"


def sentence(fact: Fact) -> str:
    return _FORMS[fact.kind].format(fact.name, *fact.values)


def spell(subject: str, values: Sequence[str | int]) -> str:
    """An answer: what there is about the name, without the name."""
    return ", ".join(map(str, values))


def read_facts(text: str) -> list[Fact]:
    """The facts in a document, in its order."""
    found = [(match.start(), kind, match.groups()) for kind, form in _PATTERNS.items() for match in form.finditer(text)]
    return [Fact(kind, name, values) for _, kind, (name, *values) in sorted(found) for values in [tuple(values)]]


def read_question(question: str) -> tuple[str, str] | None:
    """Kind and name that a question asks for; None if it is not one of the bench in English."""
    return next(((kind, match[1]) for kind, form in _ASKED.items() if (match := form.fullmatch(question))), None)


class EnglishTask(SyntheticTask):
    """A task of the bench in prose: the user's texts, or RULER's noise."""

    answer_tokens = 64

    def __init__(
        self, name: str, task: str, tokenizer: Tokenizer, chunk_tokens: int, essays: str | None = None, tokens_per_fact: int = 64
    ):
        """
        Args:
            task: one of the bench's tasks.
            chunk_tokens: of the agent; gaps are counted in such chunks.
            tokens_per_fact: of the document, for each fact that the answer does not need.

        Raises:
            ValueError: there is no text at `essays`.
        """
        self.task, self.chunk_tokens, self.tokens_per_fact = task, chunk_tokens, tokens_per_fact
        self.haystack = read_essays(essays) if essays else Haystack(NOISE, " ", "noise")
        super().__init__(name, tokenizer, f"bench {FORMAT}, {chunk_tokens}, {tokens_per_fact}, {self.haystack.version}")

    def plan(self, length: int, rng: Rng) -> Plan:
        return self._plan(length, rng, rng("variation").randrange(NUM_VARIATIONS))

    def sample(self, length: int, index: int, seed: int) -> Sample:
        """As for RULER's tasks; the index is the number of the variation."""

        def rng(part: str) -> random.Random:
            return random.Random(sample_seed(seed, self.name, length, index, part))

        return self.fill(self._plan(length, rng, index), length, index, seed)

    def _plan(self, length: int, rng: Rng, number: int) -> Plan:
        chunks = max(1.0, (length - self.answer_tokens - RESERVE) / self.chunk_tokens)
        varied = vary(self.task, number, int(chunks))
        story = STORIES[self.task](Draws(rng("story"), draw_name), varied)
        others = max(0, length // self.tokens_per_fact - len(story.lookalikes))
        facts = [*story.evidence, *story.lookalikes, *(story.other() for _ in range(others))]
        places = rng("places")
        shares = _evidence_shares(places, varied, chunks)
        # One other fact in each of as many equal parts, so that a share of the prose is the same share of the document.
        count = len(facts) - len(shares)
        shares += places.sample([(part + places.random()) / count for part in range(count)], count)
        sentences = list(map(sentence, facts))
        about = {"language": "english", "variation": varied.shown(), "others": len(facts) - len(story.evidence)}
        about["evidence"] = sentences[: len(story.evidence)]
        start = self.haystack.start(rng("start").random())

        def build(size: int) -> Document:
            context, found = self.haystack.hide(sentences, shares, start, size)
            return Document(context, tuple(found[: len(story.evidence)]), about)

        kind, name = story.asked
        return Plan(_QUESTIONS[kind].format(name), story.answers, story.match, build, _SMALLEST, step=2000)


def _evidence_shares(rng: random.Random, varied: Variation, chunks: float) -> list[float]:
    """The places of the evidence as shares of the document, rising; for two_hop `gap` chunks apart."""
    if varied.gap is None:
        return sorted(rng.random() for _ in range(varied.needed))
    first = rng.randrange(int(chunks) - varied.gap)
    within = sorted(_MARGIN + (1 - 2 * _MARGIN) * rng.random() for _ in range(2))
    return [(first + within[0]) / chunks, (first + varied.gap + within[1]) / chunks]
