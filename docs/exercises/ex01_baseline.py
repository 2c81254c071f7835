"""Exercise 1: the baseline."""

from torch import Tensor


def advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = R_i - mean(R over the readings of the same question)    GRPO, arXiv 2402.03300

    Args:
        rewards: [N], one for each reading.
        group_ids: [N], the question of each reading. They come in the order in which the readings ended.
    """
    num_groups = len(group_ids.unique())
    means = rewards.view(num_groups, -1).mean(dim=1)
    return rewards - means.repeat_interleave(len(rewards) // num_groups)
