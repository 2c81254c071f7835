"""Attention by PyTorch's fused kernels (`scaled_dot_product_attention`), without a mask of quadratic size."""

import torch
import torch.nn.functional as F
from torch import Tensor

from memrl.kernels.attention.batched import BatchedAttention, Runs, split_runs
from memrl.kernels.attention.eager import EagerAttention

_CPU_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_GPU_FUSED = torch.ops.aten._scaled_dot_product_efficient_attention


class SdpaAttention(BatchedAttention):
    name = "sdpa"

    def packed(self, q: Tensor, k: Tensor, v: Tensor, plan: Runs) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        outs = [
            F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=grouped) for tensors in split_runs(plan, q, k, v)
        ]
        outs = [out.transpose(1, 2).flatten(0, 1) for out in outs]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
        # The public function keeps the log-sum-exp to itself; the operators behind it return it.
        if q.device.type == "cpu" and q.dtype != torch.float16:
            out, lse = _CPU_FUSED(q, k, v, 0.0, causal, attn_mask=bias)
            return out, lse
        if q.device.type == "cuda" and q.dtype != torch.float64:
            sharing = q.shape[1] // k.shape[1]
            if sharing > 1:  # not where grouped queries are folded into the query length: decoding and shared prefixes
                k, v = k.repeat_interleave(sharing, 1), v.repeat_interleave(sharing, 1)
            bias = None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], -1)
            out, lse, *_ = _GPU_FUSED(q, k, v, bias, True, 0.0, causal)
            return out, lse[..., : q.shape[2]]  # its rows are padded to the kernel's tile
        return EagerAttention().attend(q, k, v, bias, causal)
