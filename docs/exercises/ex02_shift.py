"""Exercise 2: the log-probability of a response."""

import torch
from torch import Tensor


def response_logprobs(logits: Tensor, ids: Tensor, prompt_len: int) -> Tensor:
    """log p of each response token given all tokens before it, [T - prompt_len].

    Args:
        logits: [T, V], the model's output after each token.
        ids: [T], the prompt and then the response.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    targets = ids[prompt_len:]
    return logprobs[prompt_len:].gather(1, targets[:, None])[:, 0]
