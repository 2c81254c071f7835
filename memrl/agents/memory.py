"""The memory agent (MemAgent, arXiv 2507.02259, section 2): read a chunk, rewrite the memory, repeat; answer from the memory.

`memory_agent` is the complete algorithm. Training, evaluation and reading call the same function with different sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memrl.agents.agent_config import AgentConfig, encode_document, encode_question
from memrl.types import Sample, Trajectory

if TYPE_CHECKING:
    from memrl.llm import Session

PROMPTS = {"memory": {"question", "memory", "section"}, "answer": {"question", "memory"}, "no_memory": set()}


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
        memory = llm.remember(turn, llm.content_ids(turn))
    prompt = llm.render(prompts.answer, question=question, memory=memory)
    turns.append(await llm.chat(prompt, kind="answer", max_new_tokens=config.answer_tokens))
    return Trajectory(turns=turns, response=turns[-1].text, memory=llm.decode(memory))


def longest_turn(sizes: Mapping[str, int], config: AgentConfig, section: int, question: int) -> int:
    """Most tokens of a turn, prompt and response; `sizes` has the tokens of each prompt's text with empty slots."""
    memory = max(config.memory_tokens, sizes["no_memory"])  # the text of an empty memory is not cut to the limit
    return question + memory + max(sizes["memory"] + section + config.memory_tokens, sizes["answer"] + config.answer_tokens)
