"""The memory agent (MemAgent, arXiv 2507.02259, section 2): read a chunk, rewrite the memory, repeat; answer from the memory.

`memory_agent` is the complete algorithm. Training, evaluation and reading call the same function with different sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memrl.types import Sample, Trajectory

if TYPE_CHECKING:
    from memrl.llm import Session
    from memrl.prompts import Prompts


@dataclass(frozen=True)
class AgentConfig:
    """The memory agent's prompts, and its limits in tokens.

    Attributes:
        prompts: the prompt file's contents.
        chunk_tokens: document tokens per chunk.
        memory_tokens: maximum length of the memory, and of the response of a memory turn.
        answer_tokens: maximum length of the answer turn's response.
        question_tokens: maximum length of the question; longer ones are refused, because cutting would change their meaning.
    """

    prompts: Prompts
    chunk_tokens: int = 5000
    memory_tokens: int = 1024
    answer_tokens: int = 1024
    question_tokens: int = 1024


async def memory_agent(llm: Session, sample: Sample, config: AgentConfig) -> Trajectory:
    """Read `sample.context` chunk by chunk and answer `sample.question` from the memory.

    A document of K = ceil(tokens / chunk_tokens) chunks takes K memory turns and one answer turn; an empty document takes the
    answer turn alone.

    Raises:
        ValueError: the question is empty or longer than its limit, or the tokenizer fails on the document.
    """
    prompts = config.prompts
    question = encode_question(llm.encode, sample.question, config)
    document = encode_document(llm.encode, sample)
    memory = llm.encode(prompts.no_memory)
    turns = []
    for start in range(0, len(document), config.chunk_tokens):
        section = document[start : start + config.chunk_tokens]
        prompt = llm.render(prompts.memory, question=question, memory=memory, section=section)
        turn = await llm.chat(prompt, kind="memory", max_new_tokens=config.memory_tokens)
        turns.append(turn)
        memory = llm.content_ids(turn)
        turn.memory = turn.text
    prompt = llm.render(prompts.answer, question=question, memory=memory)
    turns.append(await llm.chat(prompt, kind="answer", max_new_tokens=config.answer_tokens))
    return Trajectory(turns=turns, response=turns[-1].text, memory=llm.decode(memory))


def encode_document(encode: Callable[[str], list[int]], sample: Sample) -> list[int]:
    """Token ids of the document, none if it is blank; a ValueError names the sample if the tokenizer fails on it."""
    try:
        return encode(sample.context) if sample.context.strip() else []
    except ValueError as error:
        raise ValueError(f"the document of sample {sample.id}: {error}") from error


def encode_question(encode: Callable[[str], list[int]], question: str, config: AgentConfig) -> list[int]:
    """The question's token ids, with its own blanks, as in the original; ValueError if it is blank or too long."""
    return check_question(encode(question) if question.strip() else [], config)


def check_question(question_ids: list[int], config: AgentConfig) -> list[int]:
    """The unchanged ids; ValueError if the question is empty or too long."""
    if not question_ids:
        raise ValueError("the question is empty")
    if len(question_ids) > config.question_tokens:
        raise ValueError(
            f"the question has {len(question_ids)} tokens, and the cap is {config.question_tokens}; shorten it or raise "
            "agent.question_tokens"
        )
    return question_ids
