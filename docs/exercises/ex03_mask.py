"""Exercise 3: what is trained."""

import torch
from torch import Tensor


def mean_loss(losses: Tensor, prompt_lens: Tensor, lens: Tensor) -> Tensor:
    """The mean of the loss over all tokens that the model wrote.

    Args:
        losses: [B, T], one for each token of each turn; turns shorter than T are filled up on the right.
        prompt_lens: [B], tokens of each prompt.
        lens: [B], tokens of each prompt and response together.
    """
    place = torch.arange(losses.shape[1])
    is_trained = place < lens[:, None]
    return (losses * is_trained).sum() / is_trained.sum()
