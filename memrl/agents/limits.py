"""The longest turn that an agent's settings allow, and checks that it fits into the model's window and into the cache.

The window is the number of positions that the model is made for. Beyond it attention meets angles that training never showed it,
and answers get worse without any error, so every command compares its longest turn with the window at its start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from memrl.agents.agent_config import AgentConfig
from memrl.agents.agent_function import load_agent_function
from memrl.prompts import PromptTemplate

if TYPE_CHECKING:
    from memrl.sampler import Sampler
    from memrl.tokenizer import Tokenizer

# Of the window, a share for each limit, tried one after the other if lowering one limit alone does not suffice.
_SHARES = (1 / 8, 1 / 32, 0.0)
_AGENT = ("agent.chunk_tokens", "agent.answer_tokens", "agent.memory_tokens", "agent.question_tokens")


def prompt_sizes(tokenizer: Tokenizer, agent: AgentConfig) -> dict[str, int]:
    """Tokens of each text that the agent needs, with empty slots; a text without slots is counted outside the chat template.

    ValueError if the chat template does not accept the prompts.
    """
    sizes = {}
    for name, slots in load_agent_function(agent.function).texts.items():
        text = agent.prompts.text(name)
        inside = PromptTemplate(text, tokenizer, agent.prompts.system, slots).num_tokens if slots else None
        sizes[name] = len(tokenizer.encode(text)) if inside is None else inside
    return sizes


def longest_turn(
    tokenizer: Tokenizer, agent: AgentConfig, *, document_tokens: int | None = None, question_tokens: int | None = None
) -> int | None:
    """Tokens of the longest turn that the settings allow, prompt and response together; None if the agent does not say.

    Args:
        document_tokens: length of the longest document; None (unknown) assumes a full chunk.
        question_tokens: length of the longest question; None assumes the limit.

    Raises:
        ValueError: the chat template does not accept the prompts.
    """
    return turn_tokens(prompt_sizes(tokenizer, agent), agent, document_tokens, question_tokens)


def turn_tokens(
    sizes: Mapping[str, int], agent: AgentConfig, document_tokens: int | None = None, question_tokens: int | None = None
) -> int | None:
    """As `longest_turn`, from the sizes of the prompts."""
    bound = load_agent_function(agent.function).longest_turn
    section = agent.chunk_tokens if document_tokens is None else min(agent.chunk_tokens, document_tokens)
    question = agent.question_tokens if question_tokens is None else question_tokens
    return None if bound is None else bound(sizes, agent, section, question)


def check_agent(
    window: int,
    sizes: Mapping[str, int],
    agent: AgentConfig,
    stretch: Callable[[int], str] = lambda tokens: "",
    *,
    document_tokens: int | None = None,
    question_tokens: int | None = None,
) -> None:
    """As `check_window` for an agent that says how long its turns can be; the other arguments as of `longest_turn`."""
    names = _AGENT if question_tokens is None else _AGENT[:-1]
    if turn_tokens(sizes, agent, document_tokens, question_tokens) is None:
        return

    def longest(limits: Mapping[str, int]) -> int:
        changed = replace(agent, **{name.removeprefix("agent."): value for name, value in limits.items()})
        return turn_tokens(sizes, changed, document_tokens, question_tokens) or 0

    check_window(window, {name: getattr(agent, name.removeprefix("agent.")) for name in names}, longest, stretch)


def check_window(
    window: int,
    limits: Mapping[str, int],
    longest: Callable[[Mapping[str, int]], int],
    stretch: Callable[[int], str] = lambda tokens: "",
    what: str = "the model's max_position_embeddings",
) -> None:
    """Check that no turn can be longer than the model's positions.

    Args:
        window: most tokens of prompt and response together.
        limits: the settings that turns depend on, by option, the first ones to be lowered first.
        longest: tokens of the longest turn with such limits; must not fall if a limit rises.
        stretch: what makes the window at least this many tokens, in words for the message; "" if nothing does.
        what: where the window comes from, for the message.

    Raises:
        ValueError: a turn can be longer; names settings and values that fit.
    """
    if (tokens := longest(limits)) <= window:
        return
    lower = " ".join(f"--{name} {value}" for name, value in fitting_limits(window, limits, longest).items())
    ways = " or ".join(filter(None, (lower, stretch(tokens)))) or "shorter prompts, or a model with a longer window"
    raise ValueError(
        f"the longest turn that the settings allow has {tokens} tokens, prompt and response together, but the window has "
        f"{window} ({what}); give {ways}"
    )


def fitting_limits(window: int, limits: Mapping[str, int], longest: Callable[[Mapping[str, int]], int]) -> dict[str, int]:
    """Limits to lower, with the largest values that fit: one alone if that suffices; empty if there are none."""

    def largest(name: str, others: Mapping[str, int], least: int) -> int:
        values = range(min(least, limits[name]), limits[name] + 1)
        too_long = bisect_left(values, True, key=lambda value: longest({**others, name: value}) > window)
        return values[max(too_long - 1, 0)]

    for share in _SHARES:
        least = max(1, int(share * window))
        for name in limits:
            value = largest(name, limits, least)
            if longest({**limits, name: value}) <= window:
                return {name: value}
        lowered = {name: min(least, limit) for name, limit in limits.items()}
        if longest(lowered) <= window:
            for name in limits:
                lowered[name] = largest(name, lowered, least)
            return {name: value for name, value in lowered.items() if value < limits[name]}
    return {}


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
