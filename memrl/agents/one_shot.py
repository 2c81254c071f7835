"""The one-shot agent: answer from the whole document in one prompt; cut the document's middle if it does not fit.

This is how a model with a long window reads without memory. As in MemAgent, equal parts of the head and the tail are kept, but
of the document's ids instead of the rendered prompt, so the question and the prompt's text are never cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from memrl.agents.agent_config import AgentConfig, encode_document, encode_question
from memrl.agents.agent_file import DEFAULT_PROMPTS
from memrl.prompts import load_prompts
from memrl.types import Sample, Trajectory

if TYPE_CHECKING:
    from memrl.llm import Session
    from memrl.prompts import Prompts


@dataclass(frozen=True)
class OneShotConfig:
    """Settings of the one-shot agent.

    Attributes:
        agent: prompts and limits of answer and question; the other limits are not used.
        window: most tokens of prompt and answer together.
    """

    agent: AgentConfig
    window: int


async def one_shot_agent(llm: Session, sample: Sample, config: OneShotConfig) -> Trajectory:
    """Answer `sample.question` from as much of `sample.context` as fits into the window.

    Returns:
        A trajectory of one turn, without memory; its score `cut_tokens` is the number of document tokens that were cut.

    Raises:
        ValueError: the question is empty or longer than its limit, or no document token fits into the window.
    """
    question = encode_question(llm.encode, sample.question, config.agent)
    document = encode_document(llm.encode, sample)
    room = room_for_document(llm, question, config.agent, config.window)
    if document and not room:
        raise ValueError(no_room(config.window, "a token of the document"))
    return await answer_at_once(llm, question, cut_middle(document, room), config.agent, len(document))


def cut_middle(ids: list[int], room: int) -> list[int]:
    """At most `room` of the ids: equal parts from head and tail; for an odd number one more from the head."""
    if len(ids) <= room:
        return ids
    tail = room // 2
    return ids[: room - tail] + ids[len(ids) - tail :]


def document_prompt(prompts: Prompts) -> str:
    """The prompt that shows the document: the prompt file's, or the default one if the file has none."""
    return prompts.document or _default_document()


@cache
def _default_document() -> str:
    document = load_prompts(DEFAULT_PROMPTS).document
    assert document is not None, "the default prompts have all texts"
    return document


def room_for_document(llm: Session, question: list[int], agent: AgentConfig, window: int) -> int:
    """Document tokens that fit into the window besides the prompt's text, the question and the longest answer.

    Raises:
        ValueError: the prompt's text, the question and the answer alone do not fit.
    """
    taken = len(llm.render(document_prompt(agent.prompts), question=question, section=[])) + agent.answer_tokens
    if taken > window:
        raise ValueError(
            f"the prompt's text, the question and the answer take {taken} tokens, but the window has {window}; "
            "lower agent.answer_tokens or raise the window"
        )
    return window - taken


def no_room(window: int, what: str) -> str:
    """The message of the error that `what` does not fit into the window."""
    return f"besides question and answer, the window of {window} tokens has no room for {what}; lower agent.answer_tokens"


async def answer_at_once(
    llm: Session, question: list[int], section: list[int], agent: AgentConfig, document_tokens: int
) -> Trajectory:
    """The only turn: answer from `section`, the shown part of a document of `document_tokens` tokens."""
    prompt = llm.render(document_prompt(agent.prompts), question=question, section=section)
    turn = await llm.chat(prompt, kind="answer", max_new_tokens=agent.answer_tokens)
    return Trajectory([turn], turn.text, scores={"cut_tokens": float(document_tokens - len(section))})
