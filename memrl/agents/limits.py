"""The longest turn that an agent's settings allow, for reading and for training, and checks that it fits into the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memrl.prompts import PromptTemplate

if TYPE_CHECKING:
    from memrl.agents import AgentConfig
    from memrl.sampler import Sampler
    from memrl.tokenizer import Tokenizer


def longest_turn(
    tokenizer: Tokenizer,
    agent: AgentConfig,
    *,
    document_tokens: int | None = None,
    question_tokens: int | None = None,
) -> int:
    """Tokens of the longest turn that the settings allow, prompt and response together.

    Args:
        document_tokens: length of the longest document; None (unknown) assumes a full chunk.
        question_tokens: length of the longest question; None assumes the limit.

    Raises:
        ValueError: the chat template does not accept the prompts.
    """
    prompts = agent.prompts
    texts = (prompts.memory, prompts.answer)
    update, answer = (PromptTemplate(text, tokenizer, prompts.system).num_tokens for text in texts)
    section = agent.chunk_tokens if document_tokens is None else min(agent.chunk_tokens, document_tokens)
    question = agent.question_tokens if question_tokens is None else question_tokens
    # The text of an empty memory is not cut to the limit.
    memory = max(agent.memory_tokens, len(tokenizer.encode(prompts.no_memory)))
    return question + memory + max(update + section + agent.memory_tokens, answer + agent.answer_tokens)


def check_turn(sampler: Sampler, tokens: int, lower: str = "agent.chunk_tokens or agent.memory_tokens") -> None:
    """Check that a turn fits into the key/value cache, before single documents fail, perhaps after hours.

    Args:
        tokens: length of the turn, prompt and response together.
        lower: the settings that make turns shorter, for the message.

    Raises:
        ValueError: it does not fit; names both sizes and the settings to change.
    """
    # As in the sampler: the last sampled token is not cached.
    size = sampler.cache.page_size
    needed = -(-(tokens - 1) // size) * size
    if needed > sampler.cache_tokens:
        gib = 1.01 * needed * sampler.cache.bytes_per_token(sampler.model.config, sampler.model.dtype) / 2**30
        raise ValueError(
            f"a turn of this agent can need a cache of {needed} tokens, but cache_gib allows "
            f"{sampler.cache_tokens}; give --cache_gib {gib:.3g} or more, or lower {lower}"
        )
