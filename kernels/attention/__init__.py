"""Attention backends: `base.AttentionBackend` is their interface, `pick_attention` chooses one."""

from memrl.kernels.attention.base import AttentionBackend, merge_into
from memrl.kernels.attention.pick import ATTENTION_NAMES, pick_attention

__all__ = ["ATTENTION_NAMES", "AttentionBackend", "merge_into", "pick_attention"]
