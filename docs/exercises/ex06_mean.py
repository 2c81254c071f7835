"""Exercise 6: the mean."""

import torch
from torch import Tensor


def step_loss(turn_losses: list[Tensor]) -> Tensor:
    """The loss of an optimizer step: the mean over all its tokens, each of the same weight    DAPO, arXiv 2503.14476, section 3.3

    Args:
        turn_losses: the losses of each turn's response tokens; turns differ in length.
    """
    return torch.stack([losses.mean() for losses in turn_losses]).mean()
