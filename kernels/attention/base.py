"""The interface of attention backends, and the merge of attention over disjoint parts of the keys.

Four operations cover training, prefill and decoding:

    packed        sequences end to end, each causally on itself; differentiable (training)
    packed_lse    the same without gradient, with log-sum-exps (the new tokens of a prompt)
    dense         every query sees every key (a prefix shared by several rows, or a prompt's earlier chunks)
    pages         one query per row against that row's pages of the cache (decoding)

The last three return the log-sum-exp of each query's scores, because attention over disjoint sets of keys A and B merges exactly:

    lse = log(e^lse_A + e^lse_B)        out = e^(lse_A - lse) out_A + e^(lse_B - lse) out_B

so attention to a shared prefix is computed once for all rows and merged with each row's own part (Juravsky et al., Hydragen,
arXiv 2402.05099; the merge is FlashAttention's own, Dao et al., arXiv 2205.14135).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class AttentionBackend(ABC):
    """Scores are q k^T / sqrt(D); with grouped queries, heads h*H/K .. (h+1)*H/K - 1 share key/value head h.

    Attributes:
        name: its name in `pick_attention`.
        preferred_page_size: default number of tokens per cache page.
        page_size_multiple: the page size must be a multiple of this.
        graphable: whether `pages` can be captured in a CUDA graph; its plan is then a `PageTable` that is overwritten in place.
    """

    name: str
    preferred_page_size: int = 64
    page_size_multiple: int = 1
    graphable: bool = False

    @abstractmethod
    def plan_packed(self, seq_lens: Sequence[int], device: torch.device | str) -> Any:
        """The plan for `packed` and `packed_lse` of sequences of these lengths, made once for all layers."""

    @abstractmethod
    def packed(self, q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
        """Causal attention within each packed sequence, differentiable: q [T, H, D], k and v [T, K, D] -> [T, H, D].

        ValueError if the planned sequences do not add up to T tokens.
        """

    @abstractmethod
    def packed_lse(self, q: Tensor, k: Tensor, v: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
        """`packed` without gradient: out [T, H, D], lse [T, H] in fp32 (fp64 for fp64 inputs)."""

    @abstractmethod
    def dense(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Every query against every key: q [N, H, D], k and v [S, K, D] -> out [N, H, D], lse [N, H]."""

    @abstractmethod
    def plan_pages(self, tables: Tensor, lengths: Tensor, page_size: int, device: torch.device | str) -> Any:
        """The plan for `pages`, made once per step for all layers.

        Args:
            tables: int64 [B, M] on the CPU, each row's pages in token order; entries beyond its length are not read.
            lengths: int64 [B] on the CPU, at least 1: number of cached tokens that each row sees.
        """

    @abstractmethod
    def pages(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
        """Each row's query [B, H, D] against its pages of k and v [pages, page_size, K, D] -> out [B, H, D], lse [B, H]."""


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
    """Base of the backends whose kernels read sequences and pages as int32 tables on the device."""

    graphable = True

    def plan_packed(self, seq_lens: Sequence[int], device: torch.device | str) -> SequenceTable:
        lengths = torch.tensor([0, *seq_lens], dtype=torch.int32)
        return SequenceTable(lengths.cumsum(0, dtype=torch.int32).to(device), max(seq_lens), tuple(seq_lens))

    def plan_pages(self, tables: Tensor, lengths: Tensor, page_size: int, device: torch.device | str) -> PageTable:
        return PageTable(tables.to(device, torch.int32), lengths.to(device, torch.int32))


def check_total(planned: int, packed: int) -> None:
    if planned != packed:
        raise ValueError(f"the planned sequences have {planned} tokens, but q has {packed}")


def merge_parts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge along dimension 1: outs [B, parts, ..., D] and lses [B, parts, ...] -> out [B, ..., D] fp32, lse [B, ...]."""
    if outs.shape[1] == 1:
        return outs.squeeze(1), lses.squeeze(1)
    lse = lses.logsumexp(1)
    weights = (lses - lse[:, None]).exp()
    return (weights[..., None] * outs).sum(1), lse


def merge_into(out: Tensor, lse: Tensor, tokens: slice | Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge another part of the keys into the given tokens' attention, in place: out [T, H, D], lse [T, H]."""
    old_lse = lse[tokens]
    total = torch.logaddexp(old_lse, other_lse)
    rescaled = out[tokens] * (old_lse - total).exp()[..., None]
    out[tokens] = (rescaled + other_out * (other_lse - total).exp()[..., None]).to(out.dtype)
    lse[tokens] = total
