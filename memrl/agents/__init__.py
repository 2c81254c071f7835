"""Agents: async functions that talk to an `llm` and return a trajectory."""

from memrl.agents.memory import AgentConfig, memory_agent

__all__ = ["AgentConfig", "memory_agent"]
