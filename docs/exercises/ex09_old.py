"""Exercise 9: several passes over the same rollouts."""

import torch
from torch import Tensor


def update(logits: Tensor, words: Tensor, advantages: Tensor, passes: int, learning_rate: float) -> Tensor:
    """The policy's logits [V] after some passes of gradient descent with the clipped loss over the same sampled words.

    rho = p(word now) / p(word when it was sampled);  loss = mean of max(-A rho, -A clip(rho, 0.8, 1.28))

    Args:
        logits: [V], the policy that sampled the words: p = softmax(logits).
        words, advantages: [N].
    """
    logits = logits.clone().requires_grad_()
    for _ in range(passes):
        logprobs = torch.log_softmax(logits, dim=-1)[words]
        old_logprobs = logprobs.detach()
        rho = (logprobs - old_logprobs).exp()
        loss = torch.maximum(-advantages * rho, -advantages * rho.clamp(0.8, 1.28)).mean()
        [gradient] = torch.autograd.grad(loss, logits)
        logits = (logits - learning_rate * gradient).detach().requires_grad_()
    return logits.detach()
