"""Root mean square layer norm (Zhang and Sennrich, arXiv 1910.07467)."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension.

    The statistics are fp32 for every dtype of x; the product with the weight is in x's dtype, as Qwen2 was trained.

    Args:
        x: [..., C].
        weight: [C].
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
