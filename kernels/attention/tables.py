"""Sequences and pages as int32 tables on the device, the inputs of flash-attn and of our Triton kernels."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memrl.kernels.attention.base import AttentionBackend


class SequenceTable(NamedTuple):
    """Sequences packed end to end.

    Attributes:
        starts: int32 [B + 1], start of each sequence, and end of the last one.
        longest: tokens of the longest sequence.
        lengths: tokens of each sequence.
    """

    starts: Tensor
    longest: int
    lengths: tuple[int, ...]


class PageTable(NamedTuple):
    """The pages that each row sees. A CUDA graph keeps the two tensors; the next step's values are copied into them.

    Attributes:
        pages: int32 [B, M], each row's pages in token order; entries beyond its length are not read.
        lengths: int32 [B], tokens that each row sees.
    """

    pages: Tensor
    lengths: Tensor


class TableAttention(AttentionBackend):
    """Base of the backends whose kernels read these tables."""

    graphable = True

    def plan_packed(self, seq_lens: Sequence[int], device: torch.device | str) -> SequenceTable:
        lengths = torch.tensor([0, *seq_lens], dtype=torch.int32)
        return SequenceTable(lengths.cumsum(0, dtype=torch.int32).to(device), max(seq_lens), tuple(seq_lens))

    def plan_pages(self, tables: Tensor, lengths: Tensor, page_size: int, device: torch.device | str) -> PageTable:
        return PageTable(tables.to(device, torch.int32), lengths.to(device, torch.int32))
