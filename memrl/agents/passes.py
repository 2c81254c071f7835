"""The passes agent (PI-Mem, arXiv 2608.03048): check all sections against one memory, merge the evidence, until nothing is new.

With the question q, sections c_1 to c_n and the memory m of the pass before (equations 1 and 2), pass k is

    o_i = model(q, c_i, m)  for all i at once        O = the o_i that bring something new        m = model(q, m, O)

and reading ends when O is empty or after `max_passes` passes. As all sections of a pass see the same memory, a later section
cannot overwrite what an earlier one gave, and a fact that only makes sense after another one is found in the next pass.

The form of a check is the paper's, `<check>yes</check>` and the evidence, or `<check>no</check>`. With the option `tags` false it
is the evidence, or the word `none`. A response without a readable check is evidence, as in the paper's code, unless it is blank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memrl.agents.agent_config import AgentConfig, encode_document, encode_question
from memrl.agents.responses import Span, in_groups, joined, part_ids, response_text, tag_word, together
from memrl.types import Sample, Trajectory, Turn

if TYPE_CHECKING:
    from memrl.llm import Session

PROMPTS = {
    "check": {"question", "memory", "section"},
    "merge": {"question", "memory", "evidence"},
    "answer": {"question", "memory"},
    "no_memory": set(),
}
CAPS = {"check": 512}
_CHECK = re.compile(r".*</check>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Options:
    """Settings of the passes agent."""

    max_passes: int = 3
    """Most passes over the document."""
    between: str = "\n\n"
    """Text between two pieces of evidence in a merge turn."""
    tags: bool = True
    """Checks as tags, the paper's form; false: as bare words, for a small vocabulary."""


async def passes_agent(llm: Session, sample: Sample, config: AgentConfig) -> Trajectory:
    """Check the sections of `sample.context` in passes, and answer `sample.question` from the merged memory.

    A pass over K sections takes K check turns at once, then merge turns one after the other, each with as much evidence as
    `chunk_tokens` has room for, in document order. The memory is what the last merge turn wrote, at most `memory_tokens`.
    Scores: `passes`, `sections_read` (over all passes), and `evidence_share`, of the checks that brought something.

    Raises:
        ValueError: the question is empty or longer than its limit, or the tokenizer fails on the document.
    """
    texts, options = config.prompts.texts, config.options
    question = encode_question(llm.encode, sample.question, config)
    document = encode_document(llm.encode, sample)
    sections = [document[start : start + config.chunk_tokens] for start in range(0, len(document), config.chunk_tokens)]
    between = llm.encode(options.between)
    memory = llm.encode(config.prompts.no_memory)

    async def check(section: list[int]) -> Turn:
        prompt = llm.render(texts["check"], question=question, memory=memory, section=section)
        return await llm.chat(prompt, kind="check", max_new_tokens=config.cap("check"))

    turns: list[Turn] = []
    num_passes = num_found = 0
    while sections and num_passes < options.max_passes:
        num_passes += 1
        checks = await together(check(section) for section in sections)
        turns += checks
        evidence = [ids for turn in checks if (ids := read_evidence(llm, turn, options.tags))]
        num_found += len(evidence)
        if not evidence:
            break
        for group in in_groups(evidence, config.chunk_tokens, between):
            prompt = llm.render(texts["merge"], question=question, memory=memory, evidence=joined(group, between))
            turn = await llm.chat(prompt, kind="merge", max_new_tokens=config.memory_tokens)
            memory = llm.remember(turn, llm.content_ids(turn))
            turns.append(turn)
    prompt = llm.render(config.prompts.answer, question=question, memory=memory)
    turns.append(await llm.chat(prompt, kind="answer", max_new_tokens=config.answer_tokens))
    read = num_passes * len(sections)
    scores = {"passes": float(num_passes), "sections_read": float(read), "evidence_share": num_found / max(read, 1)}
    return Trajectory(turns, response=turns[-1].text, memory=llm.decode(memory), scores=scores)


def read_evidence(llm: Session, turn: Turn, tags: bool) -> list[int]:
    """The ids of what a check turn found; none if it found nothing."""
    text = response_text(llm, turn)
    if (tag_word(text, "check") == "no") if tags else text.strip() == "none":
        return []
    match = _CHECK.match(text) if tags else None
    return part_ids(llm, turn, Span(match.end() if match else 0, len(text)))


def longest_turn(sizes: Mapping[str, int], config: AgentConfig, section: int, question: int) -> int:
    """As `memrl.agents.memory.longest_turn`."""
    evidence = max(config.chunk_tokens, config.cap("check"))
    return (
        question
        + max(config.memory_tokens, sizes["no_memory"])
        + max(
            sizes["check"] + section + config.cap("check"),
            sizes["merge"] + evidence + config.memory_tokens,
            sizes["answer"] + config.answer_tokens,
        )
    )
