"""Advantages of single turns, each against the same turn of the group's other trajectories.

A turn's *place* is (its kind, its number among the trajectory's turns of that kind). The baseline belongs to a (question, place),
as in ReMemR1 (arXiv 2509.23040), whose baseline belongs to a (question, step), so trajectories may differ in their numbers of
turns.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from memrl.rl.advantage import group_advantages

RETURNS = ("own", "to_go")


def turn_places(kinds: Sequence[str]) -> list[tuple[str, int]]:
    """The place of each turn of a trajectory.

    >>> turn_places(["memory", "check", "memory", "answer"])
    [('memory', 0), ('check', 0), ('memory', 1), ('answer', 0)]
    """
    seen: Counter[str] = Counter()
    places = []
    for kind in kinds:
        places.append((kind, seen[kind]))
        seen[kind] += 1
    return places


def turn_returns(rewards: Sequence[float], turn_return: str = "own", discount: float = 1.0) -> list[float]:
    """What each turn of a trajectory is judged by, from the turns' rewards r_t in their order.

        own      r_t                                                ReMemR1, arXiv 2509.23040
        to_go    G_t = r_t + discount G_{t+1} = sum over k >= 0 of discount^k r_{t+k}
                                                                    GiGPO, arXiv 2505.10978; GTPO, arXiv 2511.14846

    >>> turn_returns([1.0, 0.0, 4.0], "to_go", 0.5)
    [2.0, 2.0, 4.0]

    Raises ValueError for an unknown return.
    """
    if turn_return not in RETURNS:
        raise ValueError(f"turn_return is {turn_return!r}; it must be one of {', '.join(RETURNS)}")
    returns = list(rewards)
    if turn_return == "to_go":
        for t in range(len(returns) - 2, -1, -1):
            returns[t] += discount * returns[t + 1]
    return returns


def turn_advantages(
    places: Sequence[Sequence[tuple[str, int]]],
    returns: Sequence[Sequence[float]],
    normalize_std: bool = False,
    baseline: str = "mean",
) -> list[list[float]]:
    """Each turn's return minus the baseline of its place, A_turn, for the trajectories of one group.

    Baselines and `normalize_std` are those of `group_advantages`, over the trajectories that have a turn at this place. A turn
    that no other trajectory has is compared with nothing and gets 0.

    Args:
        places, returns: one list per trajectory, one item per turn.
    """
    counts = Counter(place for row in places for place in row)
    numbers = {place: number for number, place in enumerate(place for place, count in counts.items() if count > 1)}
    turns = [(i, t) for i, row in enumerate(places) for t, place in enumerate(row) if place in numbers]
    advantages = [[0.0] * len(row) for row in places]
    if not turns:
        return advantages
    values = torch.tensor([returns[i][t] for i, t in turns])
    groups = torch.tensor([numbers[places[i][t]] for i, t in turns])
    for (i, t), advantage in zip(turns, group_advantages(values, groups, normalize_std, baseline).tolist(), strict=True):
        advantages[i][t] = advantage
    return advantages


def mixed_advantage(outcome: float, turn: float, outcome_weight: float) -> float:
    """A = alpha A_outcome + (1 - alpha) A_turn (ReMemR1, arXiv 2509.23040, its multi-level reward; alpha is 0.8 in its code)."""
    return outcome_weight * outcome + (1 - outcome_weight) * turn
