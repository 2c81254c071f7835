"""Agents: async functions that read a sample through a `Session` and return a trajectory."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from memrl.agents.agent_config import AgentConfig, encode_document, encode_question
from memrl.agents.agent_function import load_agent_function, make_config, run_agent
from memrl.agents.memory import memory_agent
from memrl.agents.one_shot import OneShotConfig, one_shot_agent
from memrl.agents.retrieval import RetrievalConfig, retrieval_agent

if TYPE_CHECKING:
    from memrl.llm import Session
    from memrl.types import Sample, Trajectory

__all__ = [
    "Agent",
    "AgentConfig",
    "OneShotConfig",
    "RetrievalConfig",
    "encode_document",
    "encode_question",
    "load_agent_function",
    "make_config",
    "memory_agent",
    "one_shot_agent",
    "retrieval_agent",
    "run_agent",
]

Config = TypeVar("Config", contravariant=True)


class Agent(Protocol[Config]):
    """The signature of an agent: `async def agent(llm, sample, config) -> Trajectory`."""

    def __call__(self, llm: Session, sample: Sample, config: Config) -> Coroutine[Any, Any, Trajectory]: ...
