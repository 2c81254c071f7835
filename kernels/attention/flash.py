"""Attention by the flash-attn package, version 2 (Dao, arXiv 2307.08691)."""

import importlib
import re

from torch import Tensor

from memrl.kernels.attention.base import PageTable, SequenceTable, TableAttention, check_total


class FlashAttention(TableAttention):
    """For fp16 and bf16 on NVIDIA GPUs of compute capability 8.0 and up, heads of at most 256; ImportError without flash-attn."""

    name = "flash"
    preferred_page_size = 256
    page_size_multiple = 256

    def __init__(self):
        self._flash = importlib.import_module("flash_attn")  # optional, so type checkers may not find it
        # From 2.8.4 on, its decoding kernel checks the lengths on the host, which a CUDA graph cannot capture.
        version = tuple(map(int, re.findall(r"\d+", self._flash.__version__)[:3]))
        self.graphable = version < (2, 8, 4)

    def packed(self, q: Tensor, k: Tensor, v: Tensor, plan: SequenceTable) -> Tensor:
        return self._varlen(q, k, v, plan)

    def packed_lse(self, q: Tensor, k: Tensor, v: Tensor, plan: SequenceTable) -> tuple[Tensor, Tensor]:
        out, lse, _ = self._varlen(q, k, v, plan, return_attn_probs=True)
        return out, lse.T

    def dense(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _ = self._flash.flash_attn_func(q[None], k[None], v[None], causal=False, return_attn_probs=True)
        return out[0], lse[0].T

    def pages(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: PageTable) -> tuple[Tensor, Tensor]:
        out, lse = self._flash.flash_attn_with_kvcache(
            q[:, None],
            k_pages,
            v_pages,
            cache_seqlens=plan.lengths,
            block_table=plan.pages,
            causal=False,
            return_softmax_lse=True,
        )
        return out[:, 0], lse[..., 0]

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor, plan: SequenceTable, **options):
        check_total(sum(plan.lengths), len(q))  # flash-attn does not check this and would read past the end
        return self._flash.flash_attn_varlen_func(
            q, k, v, plan.starts, plan.starts, plan.longest, plan.longest, causal=True, **options
        )
