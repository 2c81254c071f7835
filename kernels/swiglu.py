"""The gated activation of the feed-forward layer (Shazeer, arXiv 2002.05202)."""

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; both [..., feed-forward size]."""
    return F.silu(gate) * up
