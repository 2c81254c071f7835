"""Attention behind one switch: see `base.AttentionBackend` for what a backend does and `pick_attention` for the choice."""

from memrl.kernels.attention.base import AttentionBackend, merge_into
from memrl.kernels.attention.pick import ATTENTION_NAMES, pick_attention

__all__ = ["ATTENTION_NAMES", "AttentionBackend", "merge_into", "pick_attention"]
