"""The recall agent (ReMemR1, arXiv 2509.23040): a memory turn may also ask for one of the reader's own earlier memories.

The state is the memory m_t and a query q_t. With E(q, memories) the memory that BM25 ranks highest for q,

    m_{t+1}, q_{t+1} = model(question, section_t, m_t, E(q_t, {m_1 .. m_{t-1}}))

and the answer turn also sees what the last query recalls. So what a later section pushed out of the memory can come back.

The form of a response is the memory and, if wanted, `<recall>query</recall>`; everything else is the memory. With the option
`tags` false it is the memory and, if wanted, the word `recall` and the query. A response without a memory keeps the old one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memrl.agents.agent_config import AgentConfig, encode_document, encode_question
from memrl.agents.responses import Span, part_ids, response_text
from memrl.agents.retrieval import OTHER, bm25_scores, split_words
from memrl.types import Sample, Trajectory

if TYPE_CHECKING:
    from memrl.llm import Session

PROMPTS = {
    "recall": {"question", "memory", "recalled", "section"},
    "recall_answer": {"question", "memory", "recalled"},
    "no_memory": set(),
    "nothing_recalled": set(),
}
_QUERY = {
    True: re.compile(r"<recall>(.*?)(?:</recall>|$)", re.DOTALL | re.IGNORECASE),
    False: re.compile(r"(?<!\S)recall(?!\S)(.*)$", re.DOTALL),
}


@dataclass(frozen=True)
class Options:
    """Settings of the recall agent."""

    kept_memories: int = 256
    """Most earlier memories to search, the latest ones; bounds the cost of a query, so reading stays linear in the document."""
    tags: bool = True
    """Queries in tags, the paper's form; false: after a bare word, for a small vocabulary."""


async def recall_agent(llm: Session, sample: Sample, config: AgentConfig) -> Trajectory:
    """Read `sample.context` section by section with a look at earlier memories, and answer `sample.question`.

    A document of K sections takes K memory turns and one answer turn. Scores: `queries`, the turns that asked, and `recalls`, the
    queries that found a memory.

    Raises:
        ValueError: the question is empty or longer than its limit, the tokenizer fails on the document, or bm25s is missing.
    """
    prompts, options = config.prompts, config.options
    question = encode_question(llm.encode, sample.question, config)
    document = encode_document(llm.encode, sample)
    memory = start_memory = llm.encode(prompts.no_memory)
    recalled = nothing = llm.encode(prompts.texts["nothing_recalled"])
    earlier: dict[tuple[int, ...], list[str]] = {}  # the words of each memory that was replaced
    turns, num_queries, num_recalls = [], 0, 0
    for start in range(0, len(document), config.chunk_tokens):
        section = document[start : start + config.chunk_tokens]
        prompt = llm.render(prompts.texts["recall"], question=question, memory=memory, recalled=recalled, section=section)
        turn = await llm.chat(prompt, kind="memory", max_new_tokens=config.memory_tokens)
        text = response_text(llm, turn)
        query, spans = split_response(text, options.tags)
        new = [token for span in spans for token in part_ids(llm, turn, span)][: config.memory_tokens] or memory
        if new != memory and memory != start_memory:
            earlier.pop(tuple(memory), None)  # it is the latest now
            earlier[tuple(memory)] = split_words(llm.decode(memory))
        if len(earlier) > options.kept_memories:
            del earlier[next(iter(earlier))]
        memory = llm.remember(turn, new)
        found = find_memory(query, {ids: words for ids, words in earlier.items() if list(ids) != memory})
        recalled = nothing if found is None else list(found)
        num_queries, num_recalls = num_queries + bool(query), num_recalls + (found is not None)
        turns.append(turn)
    prompt = llm.render(prompts.texts["recall_answer"], question=question, memory=memory, recalled=recalled)
    turns.append(await llm.chat(prompt, kind="answer", max_new_tokens=config.answer_tokens))
    scores = {"queries": float(num_queries), "recalls": float(num_recalls)}
    return Trajectory(turns, response=turns[-1].text, memory=llm.decode(memory), scores=scores)


def split_response(text: str, tags: bool = True) -> tuple[str, list[Span]]:
    """The first query, "" without one, and where the text has the memory: everything outside of queries.

    >>> split_response("emma: bear<recall>simon</recall>")
    ('simon', [Span(start=0, end=10)])
    """
    queries = list(_QUERY[tags].finditer(text))
    edges = [0, *(edge for query in queries for edge in query.span()), len(text)]
    spans = [Span(*edges[place : place + 2]) for place in range(0, len(edges), 2)]
    return queries[0][1].strip() if queries else "", [span for span in spans if text[span.start : span.end].strip()]


def find_memory(query: str, memories: Mapping[tuple[int, ...], Sequence[str]]) -> tuple[int, ...] | None:
    """The memory with the highest BM25 score for the query, the earliest among equals; None if none has a word of it.

    Args:
        memories: the words of each memory, by its ids.
    """
    word_ids = {word: number for number, word in enumerate(dict.fromkeys(split_words(query)), start=OTHER + 1)}
    scores = bm25_scores([[word_ids.get(word, OTHER) for word in words] for words in memories.values()], len(word_ids))
    return list(memories)[int(scores.argmax())] if len(memories) and scores.max() > 0 else None


def longest_turn(sizes: Mapping[str, int], config: AgentConfig, section: int, question: int) -> int:
    """As `memrl.agents.memory.longest_turn`."""
    memory = max(config.memory_tokens, sizes["no_memory"])
    recalled = max(config.memory_tokens, sizes["nothing_recalled"])
    rest = max(sizes["recall"] + section + config.memory_tokens, sizes["recall_answer"] + config.answer_tokens)
    return question + memory + recalled + rest
