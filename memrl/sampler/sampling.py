"""From logits to the next token: pure functions over a batch of rows.

Randomness is counter-based: the number that picks a row's token is a hash of (the row's seed, the token's position) and of
nothing else, so a row does not depend on its batch mates, on the order of work, or on what was sampled before.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        max_new_tokens: hard cap on the response, stop token included.
        temperature: divides the logits; 0 is greedy.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        top_k: keep this many most likely tokens; 0 keeps all.
        stop_ids: any of these ends the response and is part of it.
        seed: the row's own randomness; see `row_seed`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: Sequence[int] = ()
    seed: int = 0

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (off) or positive")


def row_seed(*identity: int) -> int:
    """A 63-bit seed from what a row is, for instance (seed, step, group, rollout, turn)."""
    digest = hashlib.blake2b(struct.pack(f"<{len(identity)}q", *identity), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) per row, fp64 [B], a function of seeds and positions (both int64 [B]) only.

    The mixer is splitmix64 (Steele, Lea and Flood, OOPSLA 2014): state = seed + (position + 1) * golden ratio, then two
    multiply-xorshift rounds. int64 arithmetic wraps, and the masks turn its arithmetic shifts into logical ones.
    """
    z = seeds + (positions + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    return ((z >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def sample_tokens(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, uniforms: Tensor, truncated: bool
) -> tuple[Tensor, Tensor]:
    """Pick one token per row by inverting the cumulative distribution at `uniforms`.

    Args:
        logits: fp32 [B, V].
        temperature, top_p: fp32 [B]; temperature 0 takes the most likely token.
        top_k: int64 [B].
        uniforms: fp64 [B] in [0, 1).
        truncated: whether any row uses top_p or top_k (known to the caller without asking the device).

    Returns:
        ids int64 [B], and their fp32 log-probabilities [B] under softmax(logits / temperature), that is before truncation;
        a greedy row's are those at temperature 1.
    """
    greedy = temperature == 0
    log_p = (logits / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    p = log_p.exp()
    if truncated:
        p = _truncate(p, top_p, top_k)
    # fp64, because at fp32 the tail of a 150,000-word vocabulary would fall below the sum's rounding.
    cdf = p.double().cumsum(-1)
    ids = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True).squeeze(-1)
    ids = torch.where(greedy, logits.argmax(-1), ids.clamp(max=logits.shape[-1] - 1))
    return ids, log_p.gather(-1, ids[:, None]).squeeze(-1)


def _truncate(p: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Zero what lies outside each row's top_k most likely tokens and its top_p nucleus."""
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(p.shape[-1], device=p.device)
    # The nucleus includes the token that crosses top_p, so what precedes a kept token sums to less than top_p.
    before = ordered.double().cumsum(-1) - ordered
    keep = (before < top_p[:, None]) & ((top_k[:, None] == 0) | (rank < top_k[:, None]))
    keep[:, 0] = True
    return torch.zeros_like(p).scatter_(-1, order, torch.where(keep, ordered, 0.0))
