"""How many tokens an agent's settings can ask of the sampler: one formula, for reading and for training."""

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
        document_tokens: of the longest document; None where nobody knows, which takes a full chunk.
        question_tokens: of the longest question; None takes the cap.

    Raises:
        ValueError: the chat template does not take the prompts.
    """
    prompts = agent.prompts
    texts = (prompts.memory, prompts.answer)
    update, answer = (PromptTemplate(text, tokenizer, prompts.system).num_tokens for text in texts)
    section = agent.chunk_tokens if document_tokens is None else min(agent.chunk_tokens, document_tokens)
    question = agent.question_tokens if question_tokens is None else question_tokens
    # What stands there before anything was read is not cut to the cap.
    memory = max(agent.memory_tokens, len(tokenizer.encode(prompts.no_memory)))
    return question + memory + max(update + section + agent.memory_tokens, answer + agent.answer_tokens)


def check_cache(
    sampler: Sampler,
    tokenizer: Tokenizer,
    agent: AgentConfig,
    *,
    document_tokens: int | None = None,
    question_tokens: int | None = None,
) -> None:
    """Whether the key/value cache holds the longest turn; arguments as in `longest_turn`.

    Found out now, because otherwise every document would fail by itself, the first one maybe after hours.

    Raises:
        ValueError: it does not; names both numbers and the way out.
    """
    longest = longest_turn(tokenizer, agent, document_tokens=document_tokens, question_tokens=question_tokens)
    check_turn(sampler, longest, "agent.chunk_tokens or agent.memory_tokens")


def check_turn(sampler: Sampler, tokens: int, lower: str) -> None:
    """Whether the key/value cache holds a turn of so many tokens, prompt and response together.

    Args:
        lower: the settings that make turns shorter, for the message.

    Raises:
        ValueError: it does not; names both numbers and the way out.
    """
    # As the sampler counts: the last sampled token needs no place.
    size = sampler.cache.page_size
    needed = -(-(tokens - 1) // size) * size
    if needed > sampler.cache_tokens:
        gib = 1.01 * needed * sampler.cache.bytes_per_token(sampler.model.config, sampler.model.dtype) / 2**30
        raise ValueError(
            f"a turn of this agent can need a cache of {needed} tokens, but cache_gib allows "
            f"{sampler.cache_tokens}; give --cache_gib {gib:.3g} or more, or lower {lower}"
        )
