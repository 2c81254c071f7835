"""The model's hot operations, one file each, in plain PyTorch.

These eager definitions are the reference that any faster version of an operation has to agree with. The package imports torch
and nothing of memrl.

Shape legend of every file:
    T tokens of all sequences, packed end to end     B sequences      S cached positions
    H query heads     K key/value heads (H % K == 0)     D head size     C hidden size     V vocabulary     N selected tokens
"""

from kernels.attention import AttentionBackend, merge_into, pick_attention
from kernels.logprob import multiplies_bf16, token_logprobs
from kernels.rms_norm import rms_norm
from kernels.rope import apply_rope
from kernels.swiglu import swiglu

__all__ = [
    "AttentionBackend",
    "apply_rope",
    "merge_into",
    "multiplies_bf16",
    "pick_attention",
    "rms_norm",
    "swiglu",
    "token_logprobs",
]
