"""Batched generation with a paged key/value cache; it works on token ids and is independent of agents, rewards and training."""

from memrl.sampler.sampler import Completion, Sampler
from memrl.sampler.sampling import SamplingParams
from memrl.sampler.scheduler import Request

__all__ = ["Completion", "Request", "Sampler", "SamplingParams"]
