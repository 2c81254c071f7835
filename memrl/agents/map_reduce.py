"""The map-reduce agent: take notes on every section alone, all at once, and combine the notes level by level.

    n_i = model(question, section_i)  for all i at once        n' = model(question, n_i .. n_j)  until one note is left

It needs no training to be of use and is the baseline of the agents with a memory: it reads in the fewest steps one after another,
but no section is read with the knowledge of another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memrl.agents.agent_config import AgentConfig, encode_document, encode_question
from memrl.agents.responses import in_groups, joined, response_text, together
from memrl.types import Sample, Trajectory, Turn

if TYPE_CHECKING:
    from memrl.llm import Session

PROMPTS = {
    "map": {"question", "section"},
    "reduce": {"question", "notes"},
    "answer": {"question", "memory"},
    "no_memory": set(),
    "nothing": set(),
}


@dataclass(frozen=True)
class Options:
    """Settings of the map-reduce agent."""

    between: str = "\n\n"
    """Text between two notes in a reduce turn."""


async def map_reduce_agent(llm: Session, sample: Sample, config: AgentConfig) -> Trajectory:
    """Take notes on the sections of `sample.context`, combine them, and answer `sample.question` from what is left.

    K sections take K map turns at once, and at most K - 1 reduce turns: each combines as many notes as `chunk_tokens` has room
    for, at least two, in document order; those of a level run at once. A note has at most `memory_tokens`. Notes that are blank
    or the prompt file's text `nothing` are dropped. Scores: `sections_read`, `notes` (that were kept), `levels` of combining.

    Raises:
        ValueError: the question is empty or longer than its limit, or the tokenizer fails on the document.
    """
    texts = config.prompts.texts
    question = encode_question(llm.encode, sample.question, config)
    document = encode_document(llm.encode, sample)
    sections = [document[start : start + config.chunk_tokens] for start in range(0, len(document), config.chunk_tokens)]
    between = llm.encode(config.options.between)

    async def write(kind: str, **slots: list[int]) -> Turn:
        prompt = llm.render(texts[kind], question=question, **slots)
        return await llm.chat(prompt, kind=kind, max_new_tokens=config.memory_tokens)

    turns = await together(write("map", section=section) for section in sections)
    notes = [llm.content_ids(turn) for turn in turns if has_note(response_text(llm, turn), texts["nothing"])]
    num_notes, num_levels = len(notes), 0
    while len(notes) > 1:
        num_levels += 1
        groups = in_groups(notes, config.chunk_tokens, between, least=2)
        pairs = [group for group in groups if len(group) > 1]  # the last one may have a single note, which stays as it is
        combined = await together(write("reduce", notes=joined(group, between)) for group in pairs)
        notes = [llm.content_ids(turn) for turn in combined] + [note for group in groups[len(pairs) :] for note in group]
        turns += combined
    memory = notes[0] if notes else llm.encode(config.prompts.no_memory)
    if turns:
        llm.remember(turns[-1], memory)
    prompt = llm.render(config.prompts.answer, question=question, memory=memory)
    turns.append(await llm.chat(prompt, kind="answer", max_new_tokens=config.answer_tokens))
    scores = {"sections_read": float(len(sections)), "notes": float(num_notes), "levels": float(num_levels)}
    return Trajectory(turns, response=turns[-1].text, memory=llm.decode(memory), scores=scores)


def has_note(text: str, nothing: str) -> bool:
    """Whether a map turn found something.

    >>> has_note("Nothing.", "nothing"), has_note("nothing rhymes with emma", "nothing")
    (False, True)
    """
    return text.strip(" \t\r\n.").lower() not in ("", nothing.strip(" \t\r\n.").lower())


def longest_turn(sizes: Mapping[str, int], config: AgentConfig, section: int, question: int) -> int:
    """As `memrl.agents.memory.longest_turn`."""
    between = len(config.options.between.encode()) + 1  # tokens have at least a byte; some tokenizers put a blank in front
    notes = max(config.chunk_tokens, 2 * config.memory_tokens + between)
    return question + max(
        sizes["map"] + section + config.memory_tokens,
        sizes["reduce"] + notes + config.memory_tokens,
        sizes["answer"] + max(config.memory_tokens, sizes["no_memory"]) + config.answer_tokens,
    )
