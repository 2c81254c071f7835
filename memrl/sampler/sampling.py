"""Sample the next token from logits: pure functions over a batch of rows.

Randomness is counter-based: the random number for a row's token is a hash of (the row's seed, the token's position) alone, so a
row does not depend on the other rows of its batch, on scheduling, or on earlier samples.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memrl.sampler.top_k_top_p import MIN_WIDTH, find_above, sample_truncated

BLOCK = 1024  # tokens per block; the cumulative sum runs over block sums first, then within one block
_FP32 = torch.finfo(torch.float32)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request.

    Attributes:
        max_new_tokens: maximum response length, including the stop token.
        temperature: divides the logits; 0 is greedy.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        top_k: keep this many most likely tokens; 0 keeps all.
        stop_ids: each of these tokens ends the response and is part of it.
        seed: seed of this request's random numbers; see `row_seed`.
        min_p: drop tokens whose probability is below this times the most likely token's; 0 keeps all.
        stop: each of these strings ends the response; the text ends before the string.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: Collection[int] = ()
    seed: int = 0
    min_p: float = 0.0
    stop: Sequence[str] = ()

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (off) or positive")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must lie in [0, 1]")
        if isinstance(self.stop, str):
            raise ValueError(f"stop is the string {self.stop!r}; it must be a list of strings: [{self.stop!r}]")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop holds {text!r}; it must hold strings of at least one character")

    @property
    def truncated(self) -> bool:
        """Whether a filter is on, so that the sampling distribution is not softmax(logits / temperature)."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) per row, fp64 [B], a function of seeds and positions (both int64 [B]) alone.

    The mixer is splitmix64 (Steele, Lea and Flood, OOPSLA 2014): state = seed + (position + 1) * golden ratio, then two
    multiply-xorshift rounds. int64 arithmetic wraps, and the masks turn its arithmetic shifts into logical ones.
    """
    z = seeds + (positions + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    return ((z >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


@dataclass(frozen=True, eq=False)
class RowParams:
    """The sampling parameters of a batch: on the device for arithmetic, and facts on the host for branches.

    Attributes:
        temperature, top_p, min_p: fp32 [B].
        top_k, seed: int64 [B].
        any_greedy, any_tempered: whether a temperature is 0, or neither 0 nor 1.
        truncated: whether any row is sampled from a truncated distribution.
        max_top_k: the largest top_k of the truncated rows; 0 without any.
        any_number: whether a row's filters may keep any number of tokens (top_p or min_p without top_k).
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seed: Tensor
    any_greedy: bool
    any_tempered: bool
    truncated: bool
    max_top_k: int
    any_number: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str) -> "RowParams":
        def column(values, dtype):
            return torch.tensor(values, dtype=dtype, device=device)

        truncated = [p for p in params if p.truncated and p.temperature > 0]
        # A positive temperature must stay positive and finite in fp32; clamping gives the same distribution.
        temperatures = [p.temperature and min(max(p.temperature, _FP32.tiny), _FP32.max) for p in params]
        return cls(
            temperature=column(temperatures, torch.float32),
            top_p=column([p.top_p for p in params], torch.float32),
            top_k=column([p.top_k for p in params], torch.int64),
            min_p=column([p.min_p for p in params], torch.float32),
            seed=column([p.seed for p in params], torch.int64),
            any_greedy=any(p.temperature == 0 for p in params),
            any_tempered=any(p.temperature not in (0, 1) for p in params),
            truncated=bool(truncated),
            max_top_k=max((p.top_k for p in truncated), default=0),
            any_number=any(p.top_k == 0 for p in truncated),
        )


class Sampled(NamedTuple):
    """One token per row; see `sample_tokens`."""

    ids: Tensor
    logprobs: Tensor
    full_logprobs: Tensor


@torch.no_grad()
def sample_tokens(logits: Tensor, rows: RowParams, uniforms: Tensor) -> Sampled:
    """Sample one token per row by inverting the cumulative distribution at `uniforms`.

    The filters apply one after the other, like transformers' logits warpers: temperature; top_k, exactly k tokens, the lowest ids
    among equal ones; top_p of the renormalised probability that top_k left; min_p relative to the most likely token. (vLLM
    applies min_p before top_k and top_p, which differs if min_p and top_p are both on: its nucleus covers less mass.) A row's
    result does not depend on the other rows. On a GPU the host never waits for the device. `logits` are not modified.

    Args:
        logits: [B, V]; -inf excludes a token, and a row needs at least one finite value.
        rows: parameters of the same B rows. Temperature 0 picks the most likely token, the lowest id among equal ones.
        uniforms: fp64 [B] in [0, 1).

    Returns:
        ids int64 [B]; logprobs fp32 [B] under the distribution that the token was drawn from; full_logprobs fp32 [B] under
        softmax(logits / temperature), before any filter. Both are equal for rows without filters; greedy rows use temperature 1.
    """
    logits = logits.float()
    batch, vocab_size = logits.shape
    greedy = rows.temperature == 0
    temperature = torch.where(greedy, 1.0, rows.temperature)[:, None]
    most_likely_id = None
    if rows.any_greedy:
        largest, most_likely_id = logits.max(-1, keepdim=True)
    else:
        largest = logits.amax(-1, keepdim=True)

    # Subtracting the maximum first avoids overflow at every temperature: all values are at most 0.
    block = min(BLOCK, -(-vocab_size // MIN_WIDTH) * MIN_WIDTH)
    scaled = logits.new_empty(batch, -(-vocab_size // block) * block)
    torch.sub(logits, largest, out=scaled[:, :vocab_size])
    scaled[:, vocab_size:] = -torch.inf
    if rows.any_tempered:
        scaled.div_(temperature)
    p = scaled.exp() if rows.truncated else scaled.exp_()

    ids, total = _invert(p.view(batch, -1, block), uniforms)
    mass = total
    if rows.truncated:
        filters = (rows.top_k, rows.top_p, rows.min_p)
        filtered = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
        any_number = filtered & (rows.top_k == 0) & ~greedy if rows.any_number else None
        kept_ids, kept_mass = sample_truncated(scaled, vocab_size, total, filters, uniforms, rows.max_top_k, any_number)
        ids = torch.where(filtered, kept_ids, ids)
        mass = torch.where(filtered & ~greedy, kept_mass, total)
    if most_likely_id is not None:
        ids = torch.where(greedy, most_likely_id.squeeze(1), ids)
    ids = ids.clamp(max=vocab_size - 1)  # NaN rows get an arbitrary id and NaN log-probabilities

    log_weight = ((logits.gather(1, ids[:, None]) - largest) / temperature).squeeze(1).double()
    return Sampled(ids, (log_weight - mass.log()).float(), (log_weight - total.log()).float())


def _invert(p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens at `uniforms` of the distributions proportional to `p` [B, N, L], and p's sums, fp64 [B].

    Finds the block first, then the token in it, so that only one block per row needs a cumulative sum. Sums are fp64: in fp32 the
    tail of a 150,000-token vocabulary would be lost to rounding.
    """
    if p.shape[1] == 1:
        cdf = p[:, 0].double().cumsum(-1)
        return find_above(cdf, uniforms[:, None] * cdf[:, -1:]), cdf[:, -1]
    ends = _block_sums(p).cumsum(-1)
    target = uniforms[:, None] * ends[:, -1:]
    block = find_above(ends, target)
    start = F.pad(ends, (1, 0)).gather(1, block[:, None])
    inside = p[torch.arange(len(p), device=p.device), block].double().cumsum(-1)
    return block * p.shape[2] + find_above(inside, target - start), ends[:, -1]


def _block_sums(p: Tensor) -> Tensor:
    """fp64 [B, N] sums of p [B, N, L]; torch converts before it sums, so in pieces: on a CPU small enough for its cache."""
    num_rows = max(1, (1 << 18 if p.device.type == "cpu" else 1 << 26) // p[0].numel())
    return torch.cat([rows.sum(-1, dtype=torch.float64) for rows in p.split(num_rows)])
