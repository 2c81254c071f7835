"""Attention as the formula, in plain PyTorch: the reference for the other backends."""

import torch
from torch import Tensor

from memrl.kernels.attention.batched import BatchedAttention, Runs, split_runs


class EagerAttention(BatchedAttention):
    name = "eager"

    def packed(self, q: Tensor, k: Tensor, v: Tensor, plan: Runs) -> Tensor:
        outs = [self.attend(*batch, None, causal=True)[0] for batch in split_runs(plan, q, k, v)]
        return torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outs])

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
