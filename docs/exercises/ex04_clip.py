"""Exercise 4: the clip."""

import torch
from torch import Tensor


def clipped_loss(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """max(-A rho, -A clip(rho)) for each token, [N]    PPO, arXiv 1707.06347, eq. 7

    The ratio rho may fall by `clip_low` and rise by `clip_high` before it stops to matter. DAPO (arXiv 2503.14476, section 3.1)
    takes 0.2 and 0.28, so that unlikely words have room to become likely.
    """
    clipped = ratio.clamp(1 - clip_high, 1 + clip_low)
    return torch.maximum(-advantages * ratio, -advantages * clipped)
