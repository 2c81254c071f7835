r"""The retrieval reader: the passages of the document that share words with the question in one prompt, one answer.

BM25 of a passage d for a question q, in Lucene's variant (Kamphuis et al., ECIR 2020, table 1; after Robertson and Zaragoza, The
Probabilistic Relevance Framework, 2009), over the different words t of q:

    score(d) = sum_t  ln(1 + (N - df_t + 0.5) / (df_t + 0.5)) * tf / (tf + k1 (1 - b + b |d| / mean |d|))

N passages, df_t of which hold t; tf: how often d holds t; |d|: words of d. Words are runs of letters and digits in any case;
Chinese and Japanese characters, which no blanks separate, are words of their own.

Passages are cut by tokens, and each shares its last quarter with the next one: without that, of a sentence that a border cuts
("the number is 74|81"), the half that holds the answer may share no word with the question. What is chosen goes back into the
order of the document, and what two passages share is shown once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from memrl.agents.memory import AgentConfig, check_question
from memrl.agents.one_shot import answer_at_once, no_room, room_for_document
from memrl.types import Sample, Trajectory

if TYPE_CHECKING:
    import numpy as np

    from memrl.llm import Session

K1, B = 1.5, 0.75
OTHER = 0  # the number of all words that the question has not; the question's own begin at 1
PASSAGES_AT_A_TIME = 256
_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W_{_IDEOGRAPHS}]+")
_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


@dataclass(frozen=True)
class RetrievalConfig:
    """
    Attributes:
        agent: prompts, cap on the answer and cap on the question; chunks and memory are of no concern here.
        tokens: of the document that are shown, at most.
        passage_tokens: of each passage; the last one may be shorter. A quarter of them are the next passage's as well.
        window: tokens that prompt and answer take together at most; None where nobody knows.
    """

    agent: AgentConfig
    tokens: int = 4000
    passage_tokens: int = 256
    window: int | None = None


async def retrieval_agent(llm: Session, sample: Sample, config: RetrievalConfig) -> Trajectory:
    """Answer `sample.question` from the passages of `sample.context` that BM25 ranks highest.

    As many passages as `config.tokens` holds, or fewer where the window is smaller; a document that fits is shown as it is. Of
    equal scores the earlier passage counts as higher, so a question without any word of the document takes the document's head.

    Returns:
        A trajectory of one turn, without memory; its score `cut_tokens` counts the document's tokens that were left out.

    Raises:
        ValueError: the question is empty or longer than its cap, there is no room for a passage, or bm25s is not installed.
    """
    question = check_question(llm.encode(sample.question.strip()), config.agent)
    room = config.tokens
    if config.window is not None:
        room = min(room, room_for_document(llm, question, config.agent, config.window))
    # One document at a time, and the sampler takes its steps in between: else every reading would tokenise and rank its document
    # before the first of them could ask for an answer, with all those documents' tokens in memory.
    async with _gate():
        document = llm.encode(sample.context) if sample.context.strip() else []
        size = len(document)
        section = document if size <= room else await _select(llm, sample.question, document, room, config)
        del document
    return await answer_at_once(llm, question, section, config.agent, size)


def _gate() -> asyncio.Lock:
    # A lock belongs to the event loop that it was first waited for in, and every `llm.run` has a loop of its own.
    return _gates.setdefault(asyncio.get_running_loop(), asyncio.Lock())


async def _select(llm: Session, question: str, document: list[int], room: int, config: RetrievalConfig) -> list[int]:
    """The highest passages in the order of the document, each token once, `room` tokens at most."""
    size = config.passage_tokens
    if room < size:
        raise ValueError(no_room(config.window or room, f"a passage of {size} tokens"))
    numbers = {word: number for number, word in enumerate(dict.fromkeys(split_words(question)), start=OTHER + 1)}
    spans = passage_spans(len(document), size)
    passages = []
    for place, span in enumerate(spans):
        if place % PASSAGES_AT_A_TIME == 0:
            await asyncio.sleep(0)
        words = split_words(llm.decode(document[span.start : span.stop]))
        passages.append([numbers.get(word, OTHER) for word in words])
    section: list[int] = []
    end = 0
    for place in choose_passages(bm25_scores(passages, len(numbers)), spans, room):
        span = spans[place]
        section += document[max(span.start, end) : span.stop]
        end = span.stop
    return section


def passage_spans(document_tokens: int, passage_tokens: int) -> list[range]:
    """Where the passages of a document lie; neighbours share a quarter, others nothing.

    >>> passage_spans(10, 4)
    [range(0, 4), range(3, 7), range(6, 10)]
    """
    shared = passage_tokens // 4
    starts = range(0, max(document_tokens - shared, 1), passage_tokens - shared)
    return [range(start, min(start + passage_tokens, document_tokens)) for start in starts]


def split_words(text: str) -> list[str]:
    """
    >>> split_words("The Prince's 2nd letter_of 1812, \u4e1c\u4eac!")
    ['the', 'prince', 's', '2nd', 'letter', 'of', '1812', '\u4e1c', '\u4eac']
    """
    return _WORD.findall(text.casefold())


def bm25_scores(passages: Sequence[Sequence[int]], num_words: int) -> np.ndarray:
    """BM25 of every passage for a question of `num_words` different words.

    The cost is linear in the words of all passages, for the index knows the question's words and one more for all others.

    Args:
        passages: the words of each; 1 to num_words are the question's, `OTHER` stands for any that the question has not.

    Returns:
        fp32 [number of passages].

    Raises:
        ValueError: bm25s is not installed.
    """
    import numpy as np

    bm25s = import_bm25s()
    found = sorted({word for passage in passages for word in passage} - {OTHER})
    if not found:  # and maybe there are no words at all, whose mean number would be divided by
        return np.zeros(len(passages), dtype=np.float32)
    index = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy")
    vocabulary = {str(number): number for number in range(num_words + 1)}
    index.index(([list(passage) for passage in passages], vocabulary), create_empty_token=False, show_progress=False)
    return index.get_scores(found)


def choose_passages(scores: Sequence[float] | np.ndarray, spans: Sequence[range], room: int) -> list[int]:
    """Places of the passages with the highest scores, in rising order; of equal scores the earlier place is the higher.

    They are taken one after the other until the next one's tokens, less those that chosen neighbours show already, exceed `room`.

    >>> choose_passages([0.0, 2.0, 0.0, 3.0], passage_spans(13, 4), 11)
    [0, 1, 3]
    """
    chosen: set[int] = set()
    for place in sorted(range(len(scores)), key=lambda place: (-scores[place], place)):
        span = spans[place]
        room -= len(span) - sum(_shared(span, spans[near]) for near in (place - 1, place + 1) if near in chosen)
        if room < 0:
            break
        chosen.add(place)
    return sorted(chosen)


def _shared(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))


def import_bm25s():
    """The package; ValueError where it is missing."""
    try:
        import bm25s
    except ImportError:
        raise ValueError("the method retrieval needs the package bm25s; pip install bm25s") from None
    return bm25s
