"""Batched generation with a paged key/value cache. It knows token ids and nothing of agents, rewards or training."""

from memrl.sampler.sampler import Completion, Sampler
from memrl.sampler.sampling import SamplingParams
from memrl.sampler.scheduler import Request

__all__ = ["Completion", "Request", "Sampler", "SamplingParams"]
