"""Make long documents: a question's gold paragraphs among its own distractors and paragraphs of a pool, in random order.

A document is filled with the question's gold paragraphs (which contain the answer), then with its own distractors (paragraphs on
similar subjects that come with the question), then with paragraphs drawn from a pool, up to a number of documents or of tokens.
So a question keeps its difficulty while its document grows from ten paragraphs to thousands (MemAgent, arXiv 2507.02259, 4.1).

The random numbers of a sample depend only on (seed, id of the question): its bytes are the same each time, whatever the order of
the questions. With the same seed and pool, the paragraphs of a shorter document are among those of a longer one, except at most
one that fills a document up to its number of tokens.

DEPARTS from the MemAgent code, which shuffles all samples of one length with one fixed permutation, so that the evidence is at
the same places in training, validation and test, and which draws paragraphs from a generator that concurrent workers advance, so
that its files cannot be reproduced.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Literal

from memrl.data.paragraphs import Paragraph, Pool, Question, draw, sample_seed
from memrl.tokenizer import Tokenizer
from memrl.types import Sample

FORMAT = "1"  # raised when the same questions, pool and settings give another sample
Repeat = Literal["refuse", "report"]
_LOOKAHEAD = 512  # number of paragraphs tried as the one that fills a document up
_GIVEN_UP = 3  # number of last paragraphs that may be removed for that one
_PASSES = 4  # passes over a document to correct its number of tokens; one is nearly always enough


class LongDocuments:
    """Makes samples from questions and a pool of paragraphs.

    Args:
        tokenizer: counts the tokens; only `of_tokens` needs it.
        repeat: what to do if the pool is too small. "refuse": raise a ValueError with the available number. "report": draw all
            paragraphs again in another order, and count the copies in the sample's `metadata["repeated"]`. Gold paragraphs and
            the question's own distractors never repeat.
        titles: write titles above the texts.
    """

    def __init__(self, pool: Pool, tokenizer: Tokenizer | None = None, repeat: Repeat = "refuse", titles: bool = True):
        self.pool, self.repeat, self.titles = pool, repeat, titles
        self._tokens = TokenCounter(tokenizer, titles)

    def of_documents(self, question: Question, num_documents: int, seed: int) -> Sample:
        """A document of `num_documents` paragraphs.

        If the question has more paragraphs of its own, distractors are left out, never gold paragraphs.

        Raises:
            ValueError: fewer documents than gold paragraphs, or more than there are paragraphs.
        """
        wanted = num_documents - len(question.gold)
        if wanted < 0:
            raise ValueError(f"{num_documents} documents: question {question.id!r} needs {len(question.gold)}, all gold")
        distractors = list(islice(self._distractors(question, seed), wanted))
        if len(distractors) < wanted:
            raise ValueError(f"{num_documents} documents: {self._shortage(question)}")
        return self._sample(question, distractors, seed)

    def of_tokens(self, question: Question, num_tokens: int, seed: int, slack: int | None = None) -> Sample:
        """A document of at most `num_tokens` tokens, and of at least `num_tokens - slack` if the paragraphs allow it.

        Each paragraph is tokenised once per object and each document once, or a few times if its tokens differ from the sum over
        its paragraphs. `metadata["num_tokens"]` is the exact number.

        Args:
            slack: tokens that may be missing; by default a hundredth of `num_tokens`.

        Raises:
            ValueError: the gold paragraphs do not fit, or all paragraphs together do not reach the length.
        """
        slack = num_tokens // 100 if slack is None else slack
        best: Sample | None = None
        error = passes = 0  # `error`: tokens of the document minus the sum over its parts
        while True:
            passes += 1
            distractors, expected, is_all = self._select(question, seed, num_tokens, error, slack)
            sample = self._sample(question, distractors, seed)
            found = self._tokens.count(sample.context)
            if found <= num_tokens and (best is None or found > best.metadata["num_tokens"]):
                best = sample
                best.metadata["num_tokens"] = found
            if num_tokens - slack <= found <= num_tokens or found - expected == error:
                break
            if best is not None and passes >= _PASSES:
                break
            error = found - expected
        assert best is not None  # a document with the expected error fits
        if is_all and found < num_tokens - slack:
            raise ValueError(f"{num_tokens} tokens: {self._shortage(question, found)}")
        return best

    def _distractors(self, question: Question, seed: int) -> Iterator[Paragraph]:
        """All distractors in the order in which they fill a document; the first ones make a shorter document."""
        rng = random.Random(sample_seed(seed, question.id))
        near = sorted(question.near)
        yield from (near[place] for place in draw(rng, len(near), len(near)))
        own = question.gold + question.near
        yield from self.pool.others(rng, own)
        while self.repeat == "report" and self.pool.num_others(own):
            yield from self.pool.others(rng, own)

    def _select(
        self, question: Question, seed: int, num_tokens: int, error: int, slack: int
    ) -> tuple[list[Paragraph], int, bool]:
        """Distractors whose tokens, with those of the gold paragraphs and `error`, fill `num_tokens`.

        Returns:
            They, the tokens of the document without `error`, and whether they are all that there are.
        """
        tokens = self._tokens.total(question.gold)
        room = num_tokens - error - tokens
        if room < 0:
            gold = f"the {len(question.gold)} gold paragraphs of question {question.id!r}"
            raise ValueError(f"{num_tokens} tokens: {gold} take {tokens + error}; give a larger number")
        chosen: list[Paragraph] = []
        costs: list[int] = []
        stream = self._distractors(question, seed)
        for paragraph in stream:
            cost = self._tokens.paragraph(paragraph, number=len(question.gold) + len(chosen) + 1)
            if cost > room:
                left = self._fill(chosen, costs, room, chain([paragraph], islice(stream, _LOOKAHEAD)), slack)
                return chosen, num_tokens - error - left, False
            chosen.append(paragraph)
            costs.append(cost)
            room -= cost
        return chosen, num_tokens - error - room, True

    def _fill(self, chosen: list[Paragraph], costs: list[int], room: int, others: Iterable[Paragraph], slack: int) -> int:
        """Fill a document up by the first of the other paragraphs that leaves at most `slack` tokens empty, or else the one that
        leaves fewest; the last few of the chosen paragraphs may be removed for it. Returns the tokens that stay empty.

        Args:
            costs: tokens of the chosen paragraphs.
        """
        left, kept, added = room, len(chosen), []
        if room > slack:
            rooms = [room + sum(costs[len(costs) - last :]) for last in range(min(_GIVEN_UP, len(costs)) + 1)]
            for paragraph in others:
                cost = self._tokens.paragraph(paragraph, number=len(costs) + 1)
                for given_up, space in enumerate(rooms):
                    if 0 <= space - cost < left:
                        left, kept, added = space - cost, len(chosen) - given_up, [paragraph]
                if left <= slack:
                    break
        chosen[kept:] = added
        return left

    def _sample(self, question: Question, distractors: Sequence[Paragraph], seed: int) -> Sample:
        """The sample, with its paragraphs in random order.

        In `evidence`, `document` counts from 1 as the headings do; `begin` and `end` are characters of the context.
        """
        paragraphs = [*sorted(question.gold), *distractors]
        order = draw(random.Random(sample_seed(seed, question.id, "order")), len(paragraphs), len(paragraphs))
        texts = [heading(number) + body(paragraphs[place], self.titles) for number, place in enumerate(order, start=1)]
        context = SEPARATOR.join(texts)
        evidence, begin = [], 0
        for number, (place, text) in enumerate(zip(order, texts, strict=True), start=1):
            if place < len(question.gold):
                evidence.append({"title": paragraphs[place].title, "document": number, "begin": begin, "end": begin + len(text)})
            begin += len(text) + len(SEPARATOR)
        metadata = {
            **question.metadata,
            "num_documents": len(paragraphs),
            "repeated": len(paragraphs) - len(set(paragraphs)),
            "seed": seed,
            "evidence": evidence,
            "depths": [piece["begin"] / len(context) for piece in evidence],
        }
        return Sample(question.id, question.question, context, question.answers, metadata=metadata)

    def pool_tokens(self, enough: int) -> int:
        """Tokens of a document of all paragraphs of the pool; counting stops at `enough`."""
        tokens = 0
        for number, paragraph in enumerate(self.pool.paragraphs, start=1):
            if tokens >= enough:
                break
            tokens += self._tokens.paragraph(paragraph, number)
        return tokens

    def _shortage(self, question: Question, num_tokens: int | None = None) -> str:
        own, others = question.gold + question.near, self.pool.num_others(question.gold + question.near)
        advice = "give a smaller number, add a pool of paragraphs"
        if self.repeat == "refuse" and others:
            advice += ", or let paragraphs repeat (report)"
        tokens = "" if num_tokens is None else f" with {num_tokens} tokens"
        counts = f"has {len(own)} paragraphs of its own and {others} others to draw from, {len(own) + others} in all{tokens}"
        return f"question {question.id!r} {counts}; {advice}"


# --- the text of a document, and its tokens -----------------------------------------------------------------

SEPARATOR = "\n\n"


def heading(number: int) -> str:
    return f"Document {number}:\n"


def body(paragraph: Paragraph, titles: bool) -> str:
    return f"{paragraph.title}\n{paragraph.text}" if titles and paragraph.title else paragraph.text


class TokenCounter:
    """Tokens of a document as the sum over its paragraphs, each of which is tokenised once.

    A paragraph is counted with its heading and the separator after it: tokenizers that split text at line ends (byte-level BPE)
    give the same tokens for these pieces as for the whole.
    """

    def __init__(self, tokenizer: Tokenizer | None, titles: bool):
        self._tokenizer, self._titles = tokenizer, titles
        self._paragraphs: dict[Paragraph, int] = {}
        self._headings: dict[int, int] = {}

    def count(self, text: str) -> int:
        if self._tokenizer is None:
            raise ValueError("a document of a number of tokens needs a tokenizer")
        return len(self._tokenizer.encode(text))

    def paragraph(self, paragraph: Paragraph, number: int) -> int:
        """Tokens of the `number`-th paragraph of a document, with heading and separator."""
        if paragraph not in self._paragraphs:
            self._paragraphs[paragraph] = self.count(heading(1) + body(paragraph, self._titles) + SEPARATOR)
        digits = len(str(number))
        if digits not in self._headings:  # additional tokens, compared to a heading with a single digit
            self._headings[digits] = self.count(heading(10 ** (digits - 1))) - self.count(heading(1))
        return self._paragraphs[paragraph] + self._headings[digits]

    def total(self, paragraphs: Sequence[Paragraph]) -> int:
        return sum(self.paragraph(paragraph, number) for number, paragraph in enumerate(paragraphs, start=1))
