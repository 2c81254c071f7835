"""Rotary position angles (Su et al., arXiv 2104.09864) and the methods to stretch them for longer texts.

    default   w_i = theta^(-2i/D)                                            i = 0 .. D/2 - 1
    linear    w_i / factor                      position interpolation (Chen et al., arXiv 2306.15595)
    yarn      between the two, by frequency     NTK-by-parts, with the attention scaling of YaRN
                                                (Peng et al., arXiv 2309.00071)
    llama3    between the two, by wavelength    Llama 3.1 (Grattafiori et al., arXiv 2407.21783, and Meta's release)

At position p, pair i of every head is rotated by the angle p * w_i; `kernels/elementwise.py` applies the rotation.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROPE_KINDS = ("default", "linear", "yarn", "llama3")
MAX_THETA = 1e12  # the largest published one is 4.5e10, of a Llama 3 for 4 million tokens
MAX_FACTOR = 1e4  # the largest published ones are 64 (YaRN) and 512 (LongRoPE)


@dataclass(frozen=True)
class RopeConfig:
    """The map from positions to angles.

    Attributes:
        theta: base of the frequencies' geometric sequence.
        kind: one of ROPE_KINDS; "default" ignores the fields below.
        factor: ratio of the longest text to pretraining's longest text.
        original_max_position_embeddings: pretraining's longest text, in tokens (yarn, llama3).
        beta_fast: pairs with more rotations than this over the original length keep their frequency (yarn).
        beta_slow: pairs with fewer rotations than this are slowed by the full factor (yarn).
        attention_factor: multiplies cos and sin, so attention scores by its square; None uses YaRN's own 0.1 ln(factor) + 1
            (yarn).
        truncate: round the pair indices that belong to the betas outwards to integers (yarn).
        low_freq_factor: pairs with fewer rotations than this over the original length are slowed by the full factor (llama3).
        high_freq_factor: pairs with more rotations than this keep their frequency (llama3).
    """

    theta: float = 1e6
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 32768
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope type {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        if not 1 < self.theta <= MAX_THETA:
            raise ValueError(f"rope theta must be above 1 and at most {MAX_THETA:g}, got {self.theta}")
        if not 0 < self.factor <= MAX_FACTOR:
            raise ValueError(f"rope factor must be positive and at most {MAX_FACTOR:g}, got {self.factor}")
        for name in ("beta_fast", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            if value is not None and not 1e-3 <= value <= 1e6:  # 32, 1 and about 1.4 in every published model
                raise ValueError(f"rope {name} must be between 0.001 and 1e6, got {value}")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope low_freq_factor ({self.low_freq_factor}) must be positive and below "
                f"high_freq_factor ({self.high_freq_factor})"
            )

    @property
    def attention_scaling(self) -> float:
        """The factor on cos and sin: YaRN's sqrt(1/t) = 0.1 ln(factor) + 1; 1 for other kinds."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def rope_inverse_frequencies(rope: RopeConfig, head_size: int) -> Tensor:
    """Radians per position of each pair of a head: fp32 [head_size / 2], always on the CPU.

    Raises ValueError for an odd head size.
    """
    if head_size % 2:
        raise ValueError(f"rotary positions need an even head size, got {head_size}")
    # The device is explicit, because a model built on the meta device would otherwise have no frequencies. The range is integer,
    # because DeepSpeed's zero.Init casts the results of float constructors to the weights' dtype.
    pair = torch.arange(0, head_size, 2, device="cpu")
    wavelengths = rope.theta ** (pair.float() / head_size)
    unscaled = 1.0 / wavelengths
    if rope.kind == "default":
        return unscaled
    if rope.kind == "linear":
        return unscaled / rope.factor
    if rope.kind == "llama3":
        # The weight of each pair's own frequency, linear in its rotations over the original length.
        turns = rope.original_max_position_embeddings / (2 * math.pi / unscaled)
        kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return (1 - kept) * unscaled / rope.factor + kept * unscaled
    kept = _yarn_kept(rope, head_size)
    return unscaled * kept + 1.0 / (rope.factor * wavelengths) * (1 - kept)


def _yarn_kept(rope: RopeConfig, head_size: int) -> Tensor:
    """The weight of each pair's own frequency, from 1 (fast pairs) to 0 (slow pairs): fp32 [D/2].

    This is the paper's gamma, but linear in the pair index instead of the number of rotations, as in the code that YaRN's
    authors released, and in transformers and vLLM.
    """

    def pair_with(rotations: float) -> float:
        # The i whose w_i makes this many rotations over the original length L: L theta^(-2i/D) = 2 pi rotations.
        ratio = rope.original_max_position_embeddings / (2 * math.pi * rotations)
        return head_size * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    pair = torch.arange(head_size // 2, device="cpu").float()
    return 1 - ((pair - low) / (high - low)).clamp(0, 1)


def rope_angles(inverse_frequencies: Tensor, positions: Tensor, rope: RopeConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles.

    The product and its cosine are fp32 for every dtype: bf16 cannot distinguish position 257 from 256.

    Args:
        inverse_frequencies: fp32 [D/2].
        positions: int64 [T]; the result is on its device.

    Returns:
        cos, sin: [T, D] in dtype, the D/2 values repeated once, times YaRN's attention scaling.
    """
    angles = positions[:, None].float() * inverse_frequencies.to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    scaling = rope.attention_scaling
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)
