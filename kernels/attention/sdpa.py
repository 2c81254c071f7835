"""Attention by PyTorch's fused kernels (`scaled_dot_product_attention`), without a quadratic mask."""

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
        batches = split_runs(plan, q, k, v)
        outs = [F.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=grouped) for batch in batches]
        outs = [out.transpose(1, 2).flatten(0, 1) for out in outs]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
        # The public function does not return the log-sum-exp; the operators behind it do.
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
