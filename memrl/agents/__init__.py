"""Agents: async functions that read a sample through a `Session` and return a trajectory."""

from memrl.agents.memory import AgentConfig, memory_agent
from memrl.agents.one_shot import OneShotConfig, one_shot_agent
from memrl.agents.retrieval import RetrievalConfig, retrieval_agent

__all__ = ["AgentConfig", "OneShotConfig", "RetrievalConfig", "memory_agent", "one_shot_agent", "retrieval_agent"]
