"""The memory agent (MemAgent, arXiv 2507.02259, section 2): read a chunk, rewrite the memory, repeat; answer from the memory.

The function below is all of it. Training, evaluation and reading run this same function; they differ in the `llm` they hand in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memrl.types import Sample, Trajectory

if TYPE_CHECKING:
    from memrl.llm import Session
    from memrl.prompts import Prompts


@dataclass(frozen=True)
class AgentConfig:
    """The memory agent's words and limits, all in tokens.

    Attributes:
        prompts: the prompt file's contents.
        chunk_tokens: document tokens of one chunk.
        memory_tokens: hard cap on the memory; a memory turn generates no more than this.
        answer_tokens: cap on the answer turn.
        question_tokens: a longer question is refused, because cutting it would change what is asked.
    """

    prompts: Prompts
    chunk_tokens: int = 5000
    memory_tokens: int = 1024
    answer_tokens: int = 1024
    question_tokens: int = 1024


async def memory_agent(llm: Session, sample: Sample, config: AgentConfig) -> Trajectory:
    """Read `sample.context` chunk by chunk and answer `sample.question` from what was remembered.

    With K = ceil(tokens / chunk_tokens) chunks there are K memory turns and one answer turn; an empty document has the answer
    turn alone.

    Raises:
        ValueError: the question is empty or longer than its cap.
    """
    prompts = config.prompts
    question = check_question(llm.encode(sample.question.strip()), config)
    document = llm.encode(sample.context) if sample.context.strip() else []
    memory = llm.encode(prompts.no_memory)
    turns = []
    for start in range(0, len(document), config.chunk_tokens):
        section = document[start : start + config.chunk_tokens]
        prompt = llm.render(prompts.memory, question=question, memory=memory, section=section)
        turn = await llm.chat(prompt, kind="memory", max_new_tokens=config.memory_tokens)
        turns.append(turn)
        memory = llm.content_ids(turn)
    prompt = llm.render(prompts.answer, question=question, memory=memory)
    turns.append(await llm.chat(prompt, kind="answer", max_new_tokens=config.answer_tokens))
    return Trajectory(turns=turns, response=turns[-1].text, memory=llm.decode(memory))


def check_question(question_ids: list[int], config: AgentConfig) -> list[int]:
    """The question's ids as they are, or a ValueError that says what to do."""
    if not question_ids:
        raise ValueError("the question is empty")
    if len(question_ids) > config.question_tokens:
        raise ValueError(
            f"the question has {len(question_ids)} tokens, and the cap is {config.question_tokens}; shorten it or raise "
            "agent.question_tokens"
        )
    return question_ids
