"""Batched generation with a key/value cache. It knows token ids and nothing of agents, rewards or training."""

from memrl.sampler.sampler import Completion, Request, Sampler
from memrl.sampler.sampling import SamplingParams, row_seed

__all__ = ["Completion", "Request", "Sampler", "SamplingParams", "row_seed"]
