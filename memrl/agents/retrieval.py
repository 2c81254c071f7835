r"""The retrieval agent: answer in one prompt from the passages of the document that BM25 ranks highest.

BM25 of a passage d for a question q, in Lucene's variant (Kamphuis et al., ECIR 2020, table 1; after Robertson and Zaragoza, The
Probabilistic Relevance Framework, 2009), over the distinct words t of q:

    score(d) = sum_t  ln(1 + (N - df_t + 0.5) / (df_t + 0.5)) * tf / (tf + k1 (1 - b + b |d| / mean |d|))

N passages, df_t of which contain t; tf: occurrences of t in d; |d|: words of d. Words are runs of letters and digits, ignoring
case; each Chinese or Japanese character is a word, because no spaces separate them.

A passage is a paragraph: text between blank lines. Short paragraphs stand together in one passage, and a paragraph that is longer
than a passage is cut into passages that overlap by a quarter. Otherwise, if a boundary splits a sentence ("the number is 74|81"),
the half with the answer may share no word with the question. The chosen passages are shown in document order, and their overlaps
only once. Of HotpotQA's gold paragraphs among 200, 4,000 tokens of paragraphs show 98%, and of passages at fixed places 89%.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from memrl.agents.agent_config import AgentConfig, encode_document, encode_question
from memrl.agents.one_shot import answer_at_once, no_room, room_for_document
from memrl.types import Sample, Trajectory

if TYPE_CHECKING:
    import numpy as np

    from memrl.llm import Session

K1, B = 1.5, 0.75
OTHER = 0  # id of all words that are not in the question; the question's own words have ids from 1
PASSAGES_AT_A_TIME, TOKENS_AT_A_TIME = 256, 2**16  # decoded between two sampler steps
_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W_{_IDEOGRAPHS}]+")
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


@dataclass(frozen=True)
class RetrievalConfig:
    """Settings of the retrieval agent.

    Attributes:
        agent: prompts and limits of answer and question; the other limits are not used.
        tokens: most document tokens shown.
        passage_tokens: longest passage. Paragraphs with less than a quarter of it are put together, and of longer paragraphs a
            quarter of it overlaps with the next passage.
        window: most tokens of prompt and answer together; None if unknown.
    """

    agent: AgentConfig
    tokens: int = 4000
    passage_tokens: int = 256
    window: int | None = None


async def retrieval_agent(llm: Session, sample: Sample, config: RetrievalConfig) -> Trajectory:
    """Answer `sample.question` from the passages of `sample.context` that BM25 ranks highest.

    Shows as many passages as fit into `config.tokens` and the window; a document that fits is shown unchanged. Among equal scores
    the earlier passage ranks higher, so if no word of the question occurs in the document, the document's head is shown.

    Returns:
        A trajectory of one turn, without memory; its score `cut_tokens` is the number of document tokens that were not shown.

    Raises:
        ValueError: the question is empty or longer than its limit, no passage fits, or bm25s is not installed.
    """
    question = encode_question(llm.encode, sample.question, config.agent)
    room = config.tokens
    if config.window is not None:
        room = min(room, room_for_document(llm, question, config.agent, config.window))
    # One document at a time, so that the sampler can step in between. Otherwise all agents would tokenise and rank their
    # documents before the first answer is sampled, with the tokens of all documents in memory. A lock belongs to one event loop,
    # and every `llm.run` starts a new one.
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        document = encode_document(llm.encode, sample)
        size = len(document)
        section = document if size <= room else await _select(llm, sample.question, document, room, config)
        del document
    return await answer_at_once(llm, question, section, config.agent, size)


async def _select(llm: Session, question: str, document: list[int], room: int, config: RetrievalConfig) -> list[int]:
    """The best passages in document order, each token once, at most `room` tokens."""
    size = config.passage_tokens
    if room < size:
        raise ValueError(no_room(config.window or room, f"a passage of {size} tokens"))
    word_ids = {word: number for number, word in enumerate(dict.fromkeys(split_words(question)), start=OTHER + 1)}
    paragraphs: list[int] = []
    find_starts = paragraph_starts(llm.decode)
    for start in range(0, len(document), TOKENS_AT_A_TIME):
        if start:
            await asyncio.sleep(0)
        paragraphs += [start + place for place in find_starts(document[start : start + TOKENS_AT_A_TIME])]
    spans = paragraph_passages(paragraphs, len(document), size)
    passages = []
    for index, span in enumerate(spans):
        if index % PASSAGES_AT_A_TIME == 0:
            await asyncio.sleep(0)
        words = split_words(llm.decode(document[span.start : span.stop]))
        passages.append([word_ids.get(word, OTHER) for word in words])
    section: list[int] = []
    end = 0
    for index in choose_passages(bm25_scores(passages, len(word_ids)), spans, room):
        span = spans[index]
        section += document[max(span.start, end) : span.stop]
        end = span.stop
    return section


def paragraph_starts(decode: Callable[[list[int]], str]) -> Callable[[Sequence[int]], list[int]]:
    """A function that takes a document's ids piece by piece, and gives the places of those ids that begin a paragraph.

    A paragraph begins with the first visible token after a blank line. Each different id is decoded once.
    """
    known: dict[int, tuple[bool, int, int]] = {}  # of an id: whether it is visible, the line ends at its beginning and at its end
    line_ends = 0  # since the last visible character; the document begins with none, so that its head is no border

    def about(token: int) -> tuple[bool, int, int]:
        text = decode([token])
        begin, end = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        return bool(text.strip()), begin.count("\n"), end.count("\n")

    def starts(ids: Sequence[int]) -> list[int]:
        nonlocal line_ends
        places = []
        for place, token in enumerate(ids):
            if token not in known:
                known[token] = about(token)
            is_visible, before, after = known[token]
            if is_visible and line_ends + before > 1:
                places.append(place)
            line_ends = after if is_visible else line_ends + after
        return places

    return starts


def paragraph_passages(starts: Sequence[int], document_tokens: int, passage_tokens: int) -> list[range]:
    """The token ranges of the passages of a document whose paragraphs begin at `starts`, and at 0.

    >>> paragraph_passages([4, 9, 10], 14, 8)
    [range(0, 4), range(4, 9), range(9, 14)]
    >>> paragraph_passages([12], 14, 8)
    [range(0, 8), range(6, 12), range(12, 14)]
    """
    passages: list[range] = []
    for start, end in pairwise([0, *(start for start in starts if start), document_tokens]):
        if passages and len(passages[-1]) < passage_tokens // 4 and end - passages[-1].start <= passage_tokens:
            start = passages.pop().start
        passages.append(range(start, end))
    return [whole[part.start : part.stop] for whole in passages for part in passage_spans(len(whole), passage_tokens)]


def passage_spans(document_tokens: int, passage_tokens: int) -> list[range]:
    """The token ranges of the passages of a document without paragraphs; neighbours overlap by a quarter.

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
    """BM25 of every passage for a question of `num_words` distinct words.

    The cost is linear in the words of all passages, because the index has only the question's words and one for all others.

    Args:
        passages: word ids of each passage; 1 to num_words are the question's words, `OTHER` is any other word.

    Returns:
        fp32 [number of passages].
    """
    import numpy as np

    bm25s = import_bm25s()
    found: list[Any] = sorted({word for passage in passages for word in passage} - {OTHER})  # bm25s's annotation lacks int
    if not found:  # also avoids a division by zero if the passages have no words
        return np.zeros(len(passages), dtype=np.float32)
    index = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy")
    vocabulary = {str(number): number for number in range(num_words + 1)}
    index.index(([list(passage) for passage in passages], vocabulary), create_empty_token=False, show_progress=False)
    return index.get_scores(found)


def choose_passages(scores: Sequence[float] | np.ndarray, spans: Sequence[range], room: int) -> list[int]:
    """Indices of the passages with the highest scores, ascending; among equal scores the earlier passage ranks higher.

    Adds passages by rank until the next one, without its overlap with chosen neighbours, exceeds the remaining room.

    >>> choose_passages([0.0, 2.0, 0.0, 3.0], passage_spans(13, 4), 11)
    [0, 1, 3]
    """
    chosen: set[int] = set()
    for index in sorted(range(len(scores)), key=lambda index: (-scores[index], index)):
        span = spans[index]
        room -= len(span) - sum(_overlap(span, spans[near]) for near in (index - 1, index + 1) if near in chosen)
        if room < 0:
            break
        chosen.add(index)
    return sorted(chosen)


def _overlap(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))


def import_bm25s():
    """The package bm25s; ValueError if it is not installed."""
    try:
        import bm25s
    except ImportError:
        raise ValueError("the method retrieval needs the package bm25s; pip install bm25s") from None
    return bm25s
