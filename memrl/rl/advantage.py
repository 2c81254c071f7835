"""Group-relative advantages, one per trajectory (GRPO, arXiv 2402.03300; MemAgent, arXiv 2507.02259, section 3)."""

import torch
from torch import Tensor

STD_EPS = 1e-6


def group_advantages(rewards: Tensor, group_ids: Tensor, normalize_std: bool = False) -> Tensor:
    """A_i = R_i - mean of the rewards of i's group; with `normalize_std` divided by the group's standard deviation.

    Rewards come one per trajectory, so how many turns a trajectory has cannot move a baseline. The standard deviation is the
    unbiased one plus 1e-6. A group whose rewards are all equal gets exact zeros.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([7, 7, 9, 9])).tolist()
    [0.5, -0.5, 0.0, 0.0]

    Args:
        rewards: [N], any float dtype, finite.
        group_ids: int64 [N], any numbers, in any order.

    Returns:
        fp32 [N].

    Raises:
        ValueError: a group of one, or a reward that is not finite.
    """
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must be equal and flat")
    if not torch.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite; trajectory {int((~torch.isfinite(rewards)).nonzero()[0])} has another")
    rewards = rewards.float()
    ids, group, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    if (sizes < 2).any():
        raise ValueError(f"group {int(ids[sizes < 2][0])} has one trajectory; a baseline needs at least 2 (rl.group_size)")
    mean = torch.zeros(len(ids)).index_add_(0, group, rewards) / sizes
    advantages = rewards - mean[group]
    lowest = torch.full((len(ids),), float("inf")).scatter_reduce_(0, group, rewards, "amin")
    highest = torch.full((len(ids),), float("-inf")).scatter_reduce_(0, group, rewards, "amax")
    # A mean of equal numbers may miss them by a rounding error, which a tiny standard deviation would blow up.
    advantages = torch.where((lowest == highest)[group], 0.0, advantages)
    if normalize_std:
        variance = torch.zeros(len(ids)).index_add_(0, group, advantages.square()) / (sizes - 1)
        advantages = advantages / (variance.sqrt()[group] + STD_EPS)
    return advantages
