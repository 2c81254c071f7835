"""The `LLM` interface on an OpenAI-compatible server: `remote_llm` sends requests, `replies` reads what comes back within bounds,
`failures` decides what is tried again and says why, `addresses` hides keys."""

from memrl.endpoint.failures import EndpointError
from memrl.endpoint.remote_llm import RemoteLLM

__all__ = ["EndpointError", "RemoteLLM"]
