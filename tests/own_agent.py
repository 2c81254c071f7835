"""A user's agent: the memory agent, with options and caps of its own."""

from dataclasses import dataclass, replace

from memrl.agents.memory import PROMPTS, longest_turn, memory_agent

__all__ = ["PROMPTS", "longest_turn", "read"]
ORDER = "forwards"
CAPS = {"check": 98, "other": 5}


@dataclass(frozen=True)
class Options:
    twice: bool = False


async def read(llm, sample, config):
    words = sample.context.split() * (1 + config.options.twice)
    words = words if ORDER == "forwards" else words[::-1]
    config = replace(config, answer_tokens=min(config.answer_tokens, config.cap("check")))
    return await memory_agent(llm, replace(sample, context=" ".join(words)), config)
