"""The chat agent: one turn that answers the question, with the document above it if there is one.

The baseline of agents that read in several turns, and the shortest agent that talks in messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memrl.agents.agent_config import AgentConfig, encode_document, encode_question
from memrl.agents.one_shot import cut_middle
from memrl.types import Sample, Trajectory

if TYPE_CHECKING:
    from memrl.llm import Session

PROMPTS = {"document": {"question", "section"}}
QUESTION = "{question}\n\nPut the bare answer into \\boxed{}."  # without a document, unless the prompt file has a text `question`


def first_message(llm: Session, sample: Sample, config: AgentConfig) -> tuple[dict, int]:
    """The user's message, and the number of document tokens that it leaves out: the middle of what exceeds chunk_tokens.

    Raises:
        ValueError: the question is empty or longer than its limit, or the tokenizer fails on the document.
    """
    question = encode_question(llm.encode, sample.question, config)
    document = encode_document(llm.encode, sample)
    section = cut_middle(document, config.chunk_tokens)
    if document:
        content = llm.fill(config.prompts.text("document"), question=question, section=section)
    else:
        content = llm.fill(config.prompts.text("question") or QUESTION, question=question)
    return {"role": "user", "content": content}, len(document) - len(section)


async def chat_agent(llm: Session, sample: Sample, config: AgentConfig) -> Trajectory:
    """Answer in one turn; the score `cut_tokens` is the number of document tokens that were not shown."""
    message, cut_tokens = first_message(llm, sample, config)
    turn = await llm.chat([message], kind="answer", max_new_tokens=config.answer_tokens)
    return Trajectory([turn], turn.text, scores={"cut_tokens": float(cut_tokens)})


def longest_turn(sizes: Mapping[str, int], config: AgentConfig, section: int, question: int) -> int:
    """Most tokens of the turn, as in `memrl.agents.memory`."""
    return sizes["document"] + section + question + config.answer_tokens
