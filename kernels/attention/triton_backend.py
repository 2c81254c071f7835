"""Attention by our own Triton kernels."""

import os

import torch
from torch import Tensor

from memrl.kernels.attention.base import check_total, merge_parts
from memrl.kernels.attention.batched import equal_runs
from memrl.kernels.attention.sdpa import SdpaAttention
from memrl.kernels.attention.tables import PageTable, SequenceTable, TableAttention

PROGRAMS = 512  # decoding cuts its rows until there are about as many programs, a few for each multiprocessor of a large GPU
LEAST_SHARE = 256  # tokens of a row for which a program of its own pays


class TritonAttention(TableAttention):
    """For fp32, fp16 and bf16 on NVIDIA GPUs, or on a CPU where TRITON_INTERPRET=1 (a thousand times slower: for tests).

    The kernels have no backward pass: where a gradient is wanted, `packed` is PyTorch's fused attention.

    Raises:
        ImportError: Triton is not installed.
    """

    name = "triton"

    def __init__(self):
        from memrl.kernels.attention import triton_kernels

        self._kernels = triton_kernels
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
        with torch.cuda.device_of(q):  # Triton launches on the current device, wherever the tensors are
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
        """Rows are cut by the table's width and not by their lengths, so that a CUDA graph serves every length."""
        if k_pages.stride() != v_pages.stride():
            raise ValueError(f"keys and values are laid out differently: {k_pages.stride()} and {v_pages.stride()}")
        num_rows, num_heads, head_size = q.shape
        page_size, num_kv_heads = k_pages.shape[1:3]
        group = num_heads // num_kv_heads
        most_tokens = plan.pages.shape[1] * page_size
        splits = max(1, min(PROGRAMS // (num_rows * num_kv_heads), most_tokens // LEAST_SHARE))
        outs = torch.empty(num_rows, splits, num_heads, head_size, dtype=torch.float32, device=q.device)
        lses = torch.empty(num_rows, splits, num_heads, dtype=torch.float32, device=q.device)
        with torch.cuda.device_of(q):  # Triton launches on the current device, wherever the tensors are
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
        """The dtype in which products are taken: q's, but Triton's interpreter would multiply bf16 as the integers it keeps."""
        dtype = torch.float32 if interpreted() and q.dtype == torch.bfloat16 else q.dtype
        return getattr(self._kernels.tl, str(dtype).removeprefix("torch."))


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _tile(size: int) -> int:
    """The power of two that holds `size`; matrix units want 16 at least."""
    return max(16, 1 << (size - 1).bit_length())


def _block(q: Tensor) -> int:
    """How many rows or keys are worked on at once: as many as leave the compiler enough registers and shared memory."""
    return max(16, min(128, 16 * 1024 // _tile(q.shape[-1])) // q.element_size())
