"""Long documents: a question's gold paragraphs among its own distractors and as many others as wanted, in random order.

A document holds the question's gold paragraphs (where the answer stands), then its own distractors (paragraphs on similar
subjects that come with the question), then paragraphs drawn from a pool, up to a number of documents or of tokens. So a question
keeps its difficulty while its document grows from ten paragraphs to thousands (MemAgent, arXiv 2507.02259, section 4.1).

Everything random about a sample comes from (seed, id of the question) alone: the same bytes each time, whatever the order of the
questions. With the same seed and pool the paragraphs of a shorter document are among those of a longer one, but for at most one
that fills a document up to its number of tokens.

DEPARTS from the MemAgent code: that shuffles all samples of one length with one fixed permutation, so the evidence stands at the
same places in training, validation and test; it draws paragraphs from a generator that concurrent workers advance, so its files
cannot be made again.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Literal, NamedTuple

from memrl.data.paragraphs import Paragraph, Pool, Question, draw, sample_seed
from memrl.tokenizer import Tokenizer
from memrl.types import Sample

FORMAT = "1"  # raised whenever the same questions, pool and settings come to mean another sample
Repeat = Literal["refuse", "report"]
_LOOKAHEAD = 512  # so many paragraphs are tried as the one that fills a document up
_GIVEN_UP = 3  # so many of the last paragraphs may make room for that one
_PASSES = 4  # over a document, to get its tokens right; one is nearly always enough


class Selection(NamedTuple):
    """The distractors of a document.

    Attributes:
        is_all: there were no more.
    """

    distractors: list[Paragraph]
    tokens: int
    is_all: bool = False


class Filler(NamedTuple):
    """How a document is filled up.

    Attributes:
        left: tokens that stay empty.
        given_up: so many of the last paragraphs make room ...
        paragraphs: ... for these.
    """

    left: int
    given_up: int = 0
    paragraphs: tuple[Paragraph, ...] = ()


class LongDocuments:
    """Makes samples from questions and a pool of paragraphs.

    Args:
        tokenizer: counts the tokens; needed by `of_tokens` alone.
        repeat: what happens where the pool is too small. "refuse": a ValueError says how much there is. "report": the drawn
            paragraphs come again, all of them once more in another order, and the sample's `metadata["repeated"]` says how many
            documents are copies of another. Gold paragraphs and the question's own distractors stand once in any case.
        titles: titles stand above the texts.
    """

    def __init__(self, pool: Pool, tokenizer: Tokenizer | None = None, repeat: Repeat = "refuse", titles: bool = True):
        self.pool, self.repeat, self.titles = pool, repeat, titles
        self._tokens = TokenCounter(tokenizer, titles) if tokenizer else None

    def of_documents(self, question: Question, num_documents: int, seed: int) -> Sample:
        """A document of so many paragraphs.

        Where the question has more of its own, some of its distractors are left out, never a gold paragraph.

        Raises:
            ValueError: fewer documents than gold paragraphs, or more than there are.
        """
        wanted = num_documents - len(question.gold)
        if wanted < 0:
            raise ValueError(f"{num_documents} documents: question {question.id!r} needs {len(question.gold)}, all gold")
        distractors = list(islice(self._distractors(question, seed), wanted))
        if len(distractors) < wanted:
            raise ValueError(f"{num_documents} documents: {self._shortage(question)}")
        return self._sample(question, distractors, seed)

    def of_tokens(self, question: Question, num_tokens: int, seed: int, slack: int | None = None) -> Sample:
        """A document of at most so many tokens, and of at least `num_tokens - slack` where the paragraphs allow it.

        Each paragraph is tokenised once in the life of this object and each document once, or a few times where the tokens of the
        whole are not nearly the sum of the paragraphs'. `metadata["num_tokens"]` has the count.

        Args:
            slack: tokens that may be missing; a hundredth of `num_tokens` by default.

        Raises:
            ValueError: the gold paragraphs do not fit, or all paragraphs together do not reach the length.
        """
        slack = num_tokens // 100 if slack is None else slack
        best: Sample | None = None
        error = passes = 0  # `error`: by how much the document has more tokens than its parts
        while best is None or passes < _PASSES:
            passes += 1
            chosen = self._select(question, seed, num_tokens, error, slack)
            sample = self._sample(question, chosen.distractors, seed)
            found = self._tokens.count(sample.context)
            if found <= num_tokens and (best is None or found > best.metadata["num_tokens"]):
                best = sample
                best.metadata["num_tokens"] = found
            if num_tokens - slack <= found <= num_tokens or found - chosen.tokens == error:
                break
            error = found - chosen.tokens
        if chosen.is_all and found < num_tokens - slack:
            raise ValueError(f"{num_tokens} tokens: {self._shortage(question, found)}")
        return best

    def _distractors(self, question: Question, seed: int) -> Iterator[Paragraph]:
        """In the order in which they come in: the start of it makes a shorter document."""
        rng = random.Random(sample_seed(seed, question.id))
        near = sorted(question.near)
        yield from (near[place] for place in draw(rng, len(near), len(near)))
        own = question.gold + question.near
        yield from self.pool.others(rng, own)
        while self.repeat == "report" and self.pool.num_others(own):
            yield from self.pool.others(rng, own)

    def _select(self, question: Question, seed: int, num_tokens: int, error: int, slack: int) -> Selection:
        """Distractors that fill `num_tokens` by the sum of the parts' tokens and `error`."""
        tokens = self._tokens.total(question.gold)
        room = num_tokens - error - tokens
        if room < 0:
            gold = f"the {len(question.gold)} gold paragraphs of question {question.id!r}"
            raise ValueError(f"{num_tokens} tokens: {gold} take {tokens + error}; ask for more")
        chosen: list[Paragraph] = []
        costs: list[int] = []
        stream = self._distractors(question, seed)
        for paragraph in stream:
            cost = self._tokens.paragraph(paragraph, number=len(question.gold) + len(chosen) + 1)
            if cost > room:
                filler = self._fill(costs, room, chain([paragraph], islice(stream, _LOOKAHEAD)), slack)
                kept = chosen[: len(chosen) - filler.given_up]
                return Selection([*kept, *filler.paragraphs], num_tokens - error - filler.left)
            chosen.append(paragraph)
            costs.append(cost)
            room -= cost
        return Selection(chosen, num_tokens - error - room, is_all=True)

    def _fill(self, costs: Sequence[int], room: int, others: Iterable[Paragraph], slack: int) -> Filler:
        """The first of the other paragraphs that leaves at most `slack` of the room, or else the one that leaves least.

        Args:
            costs: tokens of the paragraphs that are in; the last few of them may be given up.
        """
        best = Filler(room)
        if room <= slack:
            return best
        rooms = [room + sum(costs[len(costs) - last :]) for last in range(min(_GIVEN_UP, len(costs)) + 1)]
        for paragraph in others:
            cost = self._tokens.paragraph(paragraph, number=len(costs) + 1)
            for given_up, space in enumerate(rooms):
                if 0 <= space - cost < best.left:
                    best = Filler(space - cost, given_up, (paragraph,))
            if best.left <= slack:
                break
        return best

    def _sample(self, question: Question, distractors: Sequence[Paragraph], seed: int) -> Sample:
        """The sample with its paragraphs in an order of its own.

        In `evidence`, `document` counts from 1 like the headings; `begin` and `end` are places in the context.
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
        """Tokens of a document of all of the pool's paragraphs; once there are `enough`, the rest is not counted."""
        tokens = 0
        for number, paragraph in enumerate(self.pool.paragraphs, start=1):
            if tokens >= enough:
                break
            tokens += self._tokens.paragraph(paragraph, number)
        return tokens

    def _shortage(self, question: Question, num_tokens: int | None = None) -> str:
        own, others = question.gold + question.near, self.pool.num_others(question.gold + question.near)
        advice = "ask for fewer, add a pool of paragraphs"
        if self.repeat == "refuse" and others:
            advice += ", or let paragraphs repeat (report)"
        tokens = "" if num_tokens is None else f" with {num_tokens} tokens"
        counts = f"has {len(own)} paragraphs of its own and {others} others to draw from, {len(own) + others} in all{tokens}"
        return f"question {question.id!r} {counts}; {advice}"


# --- how a document is written down, and its tokens ---------------------------------------------------------

SEPARATOR = "\n\n"


def heading(number: int) -> str:
    return f"Document {number}:\n"


def body(paragraph: Paragraph, titles: bool) -> str:
    return f"{paragraph.title}\n{paragraph.text}" if titles and paragraph.title else paragraph.text


class TokenCounter:
    """Tokens of a document as the sum over its paragraphs, each of which is tokenised once.

    A paragraph is counted with its heading and the separator behind it: where these pieces meet, tokenizers that split text at
    line ends (those of the byte-level BPE kind) find the same tokens as in the whole.
    """

    def __init__(self, tokenizer: Tokenizer, titles: bool):
        self._tokenizer, self._titles = tokenizer, titles
        self._paragraphs: dict[Paragraph, int] = {}
        self._headings: dict[int, int] = {}

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def paragraph(self, paragraph: Paragraph, number: int) -> int:
        """Tokens of a paragraph that stands in a document as its `number`-th, with heading and separator."""
        tokens = self._paragraphs.get(paragraph)
        if tokens is None:
            tokens = self.count(heading(1) + body(paragraph, self._titles) + SEPARATOR)
            self._paragraphs[paragraph] = tokens
        return tokens + self._more_digits(number)

    def total(self, paragraphs: Sequence[Paragraph]) -> int:
        return sum(self.paragraph(paragraph, number) for number, paragraph in enumerate(paragraphs, start=1))

    def _more_digits(self, number: int) -> int:
        """What a heading with this number takes more than one with a single digit."""
        digits = len(str(number))
        if digits not in self._headings:
            self._headings[digits] = self.count(heading(10 ** (digits - 1))) - self.count(heading(1))
        return self._headings[digits]
