"""The weight of each response token in the loss of an optimizer step."""

import torch
from torch import Tensor

AGGREGATIONS = ("token_mean", "prompt_mean", "seq_mean", "constant")


def token_weights(
    kind: str, turn_lens: Tensor, trajectory_ids: Tensor, group_ids: Tensor, constant: float = 1024
) -> tuple[Tensor, float]:
    """Each turn's weight per token and this rank's count; a token weighs `weight / (sum of the counts over ranks)`.

        kind         weight of a token             count                 source
        token_mean   1                             tokens                DAPO, arXiv 2503.14476
        prompt_mean  1 / tokens of the group       groups                the same paper's eq. 8 as written; ScaleRL, 2510.13786
        seq_mean     1 / tokens of the turn        turns                 GRPO, arXiv 2402.03300, eq. 3
        constant     1 / constant                  trajectories          Dr. GRPO, arXiv 2503.20783

    A turn is an independent conversation, so it is the sequence of `seq_mean`. Only turns that are trained on are given: the
    counts are taken after filtering, without groups and trajectories that have no turn left. All turns of a group, and so of a
    trajectory, must be on one rank.

    >>> token_weights("seq_mean", torch.tensor([2, 4]), torch.tensor([0, 0]), torch.tensor([0, 0]))
    (tensor([0.5000, 0.2500], dtype=torch.float64), 2.0)

    Args:
        turn_lens: int64 [n], response tokens of each turn; n may be 0.
        trajectory_ids: int64 [n], any numbers, different within a group.
        group_ids: int64 [n], any numbers.
        constant: divisor of a trajectory's sum, in tokens, whatever its length; positive.

    Returns fp64 [n], and the count. Raises ValueError for a turn without tokens, a constant that is not positive, or an unknown
    kind.
    """
    if kind not in AGGREGATIONS:
        raise ValueError(f"aggregation is {kind!r}; it must be one of {', '.join(AGGREGATIONS)}")
    if (turn_lens < 1).any():
        raise ValueError(f"turn {int((turn_lens < 1).nonzero()[0])} has no response tokens; leave such turns out")
    if not constant > 0:
        raise ValueError(f"the constant of the aggregation is {constant}; it must be positive (rl.aggregation_tokens)")
    lens = turn_lens.double()
    if kind == "token_mean":
        return torch.ones_like(lens), float(lens.sum())
    if kind == "seq_mean":
        return 1 / lens, float(len(lens))
    if kind == "prompt_mean":
        ids, group = group_ids.unique(return_inverse=True)
        group_tokens = lens.new_zeros(len(ids)).index_add_(0, group, lens)
        return 1 / group_tokens[group], float(len(ids))
    trajectories = set(zip(group_ids.tolist(), trajectory_ids.tolist(), strict=True))
    return torch.full_like(lens, 1 / constant), float(len(trajectories))


def turn_mean(values: Tensor, turn_index: Tensor) -> Tensor:
    """The mean over each token's turn, [T], differentiable; `turn_index` int64 [T] holds 0..n-1."""
    # T rows are enough for any number of turns; reading the actual number would wait for the GPU.
    sums = torch.zeros_like(values).index_add(0, turn_index, values)
    counts = torch.zeros_like(values).index_add(0, turn_index, torch.ones_like(values))
    return (sums / counts.clamp(min=1))[turn_index]
