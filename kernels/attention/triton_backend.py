"""Attention by our own Triton kernels."""

import os
from typing import Any

import torch
from torch import Tensor

from memrl.kernels.attention.base import PageTable, SequenceTable, TableAttention, check_total, merge_parts
from memrl.kernels.attention.batched import SdpaAttention, equal_runs

PROGRAMS = 512  # decoding splits its rows into about this many programs: a few per multiprocessor of a large GPU
LEAST_SHARE = 256  # minimum tokens of a row per program


class TritonAttention(TableAttention):
    """For fp32, fp16 and bf16 on NVIDIA GPUs, or on a CPU with TRITON_INTERPRET=1 (a thousand times slower: for tests).

    The kernels have no backward pass: when a gradient is needed, `packed` uses PyTorch's fused attention. ImportError without
    Triton.
    """

    name = "triton"

    def __init__(self):
        from memrl.kernels.attention import triton_kernels

        self._kernels: Any = triton_kernels  # Triton's types do not know launch options such as num_stages
        self._differentiable = SdpaAttention()

    def packed(self, q: Tensor, k: Tensor, v: Tensor, plan: SequenceTable) -> Tensor:
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            return self._differentiable.packed(q, k, v, equal_runs(plan.lengths))
        return self.packed_lse(q, k, v, plan)[0]

    def packed_lse(self, q: Tensor, k: Tensor, v: Tensor, plan: SequenceTable) -> tuple[Tensor, Tensor]:
        check_total(sum(plan.lengths), len(q))
        return self._sequences(q, k, v, plan)

    def dense(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self._sequences(q, k, v, None)

    def _sequences(self, q: Tensor, k: Tensor, v: Tensor, plan: SequenceTable | None) -> tuple[Tensor, Tensor]:
        num_queries, num_heads, head_size = q.shape
        num_kv_heads = k.shape[1]
        group = num_heads // num_kv_heads
        num_sequences, longest = (len(plan.lengths), plan.longest) if plan else (1, num_queries)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(num_queries, num_heads, dtype=torch.float32, device=q.device)
        rows = min(_block(q), _tile(longest * group))
        with torch.cuda.device_of(q):  # Triton launches on the current device, not on the tensors' device
            self._kernels.attend_sequences[(-(-longest * group // rows), num_kv_heads, num_sequences)](
                *(q, k, v, out, lse, plan.starts if plan else q, num_queries, len(k), head_size**-0.5),
                *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
                GROUP=group,
                HEAD=head_size,
                ROWS=rows,
                KEYS=_block(q),
                WIDTH=_tile(head_size),
                CAUSAL=plan is not None,
                DOT=self._factors(q),
                num_stages=2,
            )
        return out, lse

    def pages(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: PageTable) -> tuple[Tensor, Tensor]:
        """Rows are split by the table's width, not by their lengths, so that one CUDA graph fits every length."""
        if k_pages.stride() != v_pages.stride():
            raise ValueError(f"keys and values must have equal strides, found {k_pages.stride()} and {v_pages.stride()}")
        num_rows, num_heads, head_size = q.shape
        page_size, num_kv_heads = k_pages.shape[1:3]
        group = num_heads // num_kv_heads
        most_tokens = plan.pages.shape[1] * page_size
        splits = max(1, min(PROGRAMS // (num_rows * num_kv_heads), most_tokens // LEAST_SHARE))
        outs = torch.empty(num_rows, splits, num_heads, head_size, dtype=torch.float32, device=q.device)
        lses = torch.empty(num_rows, splits, num_heads, dtype=torch.float32, device=q.device)
        with torch.cuda.device_of(q):  # Triton launches on the current device, not on the tensors' device
            self._kernels.attend_pages[(num_rows, num_kv_heads, splits)](
                *(q, k_pages, v_pages, outs, lses, plan.pages, plan.lengths, plan.pages.shape[1], head_size**-0.5),
                *(q.stride(0), q.stride(1), *k_pages.stride()[:3]),
                PAGE=page_size,
                GROUP=group,
                HEAD=head_size,
                ROWS=_tile(group),
                KEYS=_block(q),
                WIDTH=_tile(head_size),
                DOT=self._factors(q),
                num_stages=2,
            )
        out, lse = merge_parts(outs, lses)
        return out.to(q.dtype), lse

    def _factors(self, q: Tensor):
        """The dtype of matrix products: q's, but fp32 for bf16 in Triton's interpreter, which multiplies bf16 as integers."""
        dtype = torch.float32 if interpreted() and q.dtype == torch.bfloat16 else q.dtype
        return getattr(self._kernels.tl, str(dtype).removeprefix("torch."))


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _tile(size: int) -> int:
    """The next power of two; matrix units need at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def _block(q: Tensor) -> int:
    """Rows or keys per tile, limited by the registers and shared memory of a GPU."""
    return max(16, min(128, 16 * 1024 // _tile(q.shape[-1])) // q.element_size())
