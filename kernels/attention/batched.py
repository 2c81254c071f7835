"""The backends in PyTorch: all operations as a few batches of dense attention."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from memrl.kernels.attention.base import AttentionBackend, check_total, merge_parts

DENSE_ENOUGH = 2 / 3  # a range of pages is read in place if at least this part of it is in use
_CPU_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_GPU_FUSED = torch.ops.aten._scaled_dot_product_efficient_attention

Runs = list[tuple[int, int]]  # (length, number of consecutive sequences of that length)


@dataclass
class PagePlan:
    """Attention to `n` pages, each by the one row that owns it.

    Attributes:
        chosen: the pages, as a slice of the pool if they (nearly) fill one, otherwise as indices.
        owners: int64 [n], the row that owns each page.
        filled: int64 [n], number of valid tokens in the page; 0 for a page inside the slice that no row owns.
        parts: int64 [B, M], index among the n pages of row b's m-th page; 0 if row b has fewer pages.
        absent: bool [B, M], True if row b has fewer pages.
        page_size: tokens of a page.
        full: whether every page is filled.
    """

    chosen: slice | Tensor
    owners: Tensor
    filled: Tensor
    parts: Tensor
    absent: Tensor
    page_size: int
    full: bool
    _bias: Tensor | None = None

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """[n, 1, 1, page_size]: 0 for valid tokens, -inf for the others; None if all are valid."""
        if self.full:
            return None
        if self._bias is None:
            beyond = torch.arange(self.page_size, device=self.filled.device) >= self.filled[:, None]
            self._bias = torch.zeros(beyond.shape, dtype=dtype, device=self.filled.device).masked_fill_(beyond, -torch.inf)
        return self._bias[:, None, None, :]


class BatchedAttention(AttentionBackend):
    """Subclasses implement `attend` for one batch; `packed` is differentiable if it is."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
        """Attention of one batch.

        Args:
            q: [B, H, M, D]; k, v: [B, K, S, D]; H is a multiple of K; only the last dimension must be contiguous.
            bias: added to the scores, [B, 1, 1, S] in q's dtype; None for no bias.
            causal: query m sees keys 0 .. m (then M = S).

        Returns:
            out [B, H, M, D] in q's dtype, lse [B, H, M] in fp32 (fp64 for fp64 inputs).
        """

    def plan_packed(self, seq_lens: Sequence[int], device: torch.device | str) -> Runs:
        """Consecutive sequences of equal length share one call, so sorting by length gives few calls without padding."""
        return equal_runs(seq_lens)

    def packed(self, q: Tensor, k: Tensor, v: Tensor, plan: Runs) -> Tensor:
        return self.packed_lse(q, k, v, plan)[0]

    def packed_lse(self, q: Tensor, k: Tensor, v: Tensor, plan: Runs) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for batch in split_runs(plan, q, k, v):
            out, lse = self.attend(*batch, None, causal=True)
            outs.append(out.transpose(1, 2).flatten(0, 1))
            lses.append(lse.transpose(1, 2).flatten(0, 1))
        return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))

    def dense(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        num_queries, num_heads, head_size = q.shape
        num_kv_heads = k.shape[1]
        # Queries of one key/value head are placed next to each other, so each key is read once for all of them.
        folded = q.view(num_queries, num_kv_heads, -1, head_size).transpose(0, 1).flatten(1, 2)[None]
        out, lse = self.attend(folded, k.transpose(0, 1)[None], v.transpose(0, 1)[None], None, causal=False)
        out = out[0].unflatten(1, (num_queries, -1)).transpose(0, 1)
        lse = lse[0].unflatten(1, (num_queries, -1)).transpose(0, 1)
        return out.reshape(q.shape), lse.reshape(num_queries, num_heads)

    def plan_pages(self, tables: Tensor, lengths: Tensor, page_size: int, device: torch.device | str) -> PagePlan:
        counts = (lengths + page_size - 1) // page_size
        present = torch.arange(int(counts.max())) < counts[:, None]
        rows, columns = present.nonzero(as_tuple=True)
        pages = tables[rows, columns]
        filled = (lengths[rows] - columns * page_size).clamp(max=page_size)
        chosen, places = pages, torch.arange(len(pages))
        low, high = int(pages.min()), int(pages.max()) + 1
        in_range = torch.bincount(pages - low, minlength=high - low)
        if int(in_range.max()) == 1 and len(pages) >= DENSE_ENOUGH * (high - low):
            chosen, places = slice(low, high), pages - low
            rows = torch.zeros(high - low, dtype=torch.int64).index_copy_(0, places, rows)
            filled = torch.zeros(high - low, dtype=torch.int64).index_copy_(0, places, filled)
        parts = torch.zeros(present.shape, dtype=torch.int64)
        parts[present] = places
        full = bool((filled == page_size).all())
        if device != "cpu" and torch.device(device).type != "cpu":
            chosen = chosen.to(device) if isinstance(chosen, Tensor) else chosen
            rows, filled, parts, present = (t.to(device) for t in (rows, filled, parts, present))
        return PagePlan(chosen, rows, filled, parts, ~present, page_size, full)

    def pages(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: PagePlan) -> tuple[Tensor, Tensor]:
        """Each page is one batch entry, so pages are read in place; the parts of a row are merged afterwards."""
        num_rows, num_heads, head_size = q.shape
        folded = q.view(num_rows, k_pages.shape[2], -1, head_size)  # (B, K, H/K, D): grouped queries as query length
        k, v = (pages[plan.chosen].transpose(1, 2) for pages in (k_pages, v_pages))
        out, lse = self.attend(folded[plan.owners], k, v, plan.bias(q.dtype), causal=False)
        out, lse = merge_parts(out[plan.parts], lse[plan.parts].masked_fill(plan.absent[..., None, None], -torch.inf))
        return out.to(q.dtype).reshape(q.shape), lse.reshape(num_rows, num_heads)


class EagerAttention(BatchedAttention):
    """The formula: the reference for the other backends."""

    name = "eager"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
        """out = softmax(q k^T / sqrt(D)) v, with scores and softmax in at least fp32."""
        sharing = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(sharing, 1), v.repeat_interleave(sharing, 1)
        exact = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(exact) @ k.to(exact).transpose(-1, -2)) * q.shape[-1] ** -0.5
        if bias is not None:
            scores = scores + bias
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        lse = scores.logsumexp(-1)
        return ((scores - lse[..., None]).exp() @ v.to(exact)).to(q.dtype), lse


class SdpaAttention(BatchedAttention):
    """PyTorch's fused kernels (`scaled_dot_product_attention`), without a quadratic mask."""

    name = "sdpa"

    def packed(self, q: Tensor, k: Tensor, v: Tensor, plan: Runs) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        batches = split_runs(plan, q, k, v)
        outs = [F.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=grouped) for batch in batches]
        outs = [out.transpose(1, 2).flatten(0, 1) for out in outs]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
        # The public function does not return the log-sum-exp; the operators behind it do, without gradient.
        if q.device.type == "cpu" and q.dtype != torch.float16:
            out, lse = _CPU_FUSED(q, k, v, 0.0, causal, attn_mask=bias)
            return out, lse
        if q.device.type == "cuda" and q.dtype != torch.float64:
            sharing = q.shape[1] // k.shape[1]
            if sharing > 1:  # `dense` and `pages` fold grouped queries into the query length instead
                k, v = k.repeat_interleave(sharing, 1), v.repeat_interleave(sharing, 1)
            bias = None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], -1)
            out, lse, *_ = _GPU_FUSED(q, k, v, bias, True, 0.0, causal)
            return out, lse[..., : q.shape[2]]  # the kernel pads its rows to a tile
        return EagerAttention().attend(q, k, v, bias, causal)


def equal_runs(seq_lens: Sequence[int]) -> Runs:
    return [(length, sum(1 for _ in run)) for length, run in groupby(seq_lens)]


def split_runs(runs: Runs, *packed: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v [T, heads, D] as one batch [count, heads, length, D] for every run of sequences of equal length."""
    check_total(sum(length * count for length, count in runs), len(packed[0]))
    start = 0
    for length, count in runs:
        end = start + length * count
        q, k, v = (tensor[start:end].unflatten(0, (count, length)).transpose(1, 2) for tensor in packed)
        yield q, k, v
        start = end
