"""Exercise 5: the penalty."""

from torch import Tensor


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log(p_ref / p), for each token: k3 of joschu.net/blog/kl-approx.html

    Its mean over tokens drawn from p is KL(p || p_ref), so it is p that is sampled from and trained.
    """
    d = logprobs - ref_logprobs
    return d.exp() - d - 1
