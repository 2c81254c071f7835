"""Group-relative advantages, one per trajectory (GRPO, arXiv 2402.03300; MemAgent, arXiv 2507.02259, section 3)."""

import torch
from torch import Tensor

STD_EPS = 1e-6
BASELINES = ("mean", "leave_one_out")
CREDITS = ("broadcast", "final_only", "split")


def group_advantages(rewards: Tensor, group_ids: Tensor, normalize_std: bool = False, baseline: str = "mean") -> Tensor:
    """Each trajectory's reward minus its group's baseline, A_i; `normalize_std` divides by the group's standard deviation.

        mean            A_i = R_i - mean of the group
        leave_one_out   A_i = R_i - mean of the others = G / (G - 1) (R_i - mean of the group)    RLOO, arXiv 2402.14740

    There is one reward per trajectory, so the number of turns cannot change a baseline. The standard deviation is the unbiased
    one plus 1e-6, for either baseline. A group of equal rewards gets exact zeros.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([7, 7, 9, 9])).tolist()
    [0.5, -0.5, 0.0, 0.0]

    Args:
        rewards: [N], any float dtype, finite.
        group_ids: int64 [N], any numbers, in any order; groups may differ in size.

    Returns fp32 [N]. Raises ValueError for a group of one, a reward that is not finite, or an unknown baseline.
    """
    if baseline not in BASELINES:
        raise ValueError(f"baseline is {baseline!r}; it must be one of {', '.join(BASELINES)}")
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
    # The mean of equal numbers can be off by a rounding error, which division by a tiny standard deviation would amplify.
    advantages = torch.where((lowest == highest)[group], 0.0, advantages)
    variance = torch.zeros(len(ids)).index_add_(0, group, advantages.square()) / (sizes - 1)
    if baseline == "leave_one_out":
        advantages = advantages * (sizes / (sizes - 1))[group]
    if normalize_std:
        advantages = advantages / (variance.sqrt()[group] + STD_EPS)
    return advantages


def credit_shares(num_turns: int, credit: str) -> list[float]:
    """The share of the trajectory's advantage on each turn's tokens, in the order of the turns.

        broadcast    1 for every turn (MemAgent, arXiv 2507.02259, section 3)
        final_only   1 for the last turn, 0 for the others
        split        1 / num_turns for every turn, so that the shares add up to 1

    Raises ValueError for a trajectory without turns, or an unknown credit.
    """
    if credit not in CREDITS:
        raise ValueError(f"credit is {credit!r}; it must be one of {', '.join(CREDITS)}")
    if num_turns < 1:
        raise ValueError(f"a trajectory has {num_turns} turns; it must have at least 1, the answer")
    if credit == "broadcast":
        return [1.0] * num_turns
    if credit == "final_only":
        return [0.0] * (num_turns - 1) + [1.0]
    return [1 / num_turns] * num_turns
