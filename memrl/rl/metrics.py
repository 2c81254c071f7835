"""The logged metrics of a step, from sums and counts over all ranks, so that they do not depend on the number of ranks.

The formula of each name: docs/metrics.md.
"""

import math
from collections.abc import Sequence

import torch

from memrl.config import RewardOptions, RLOptions
from memrl.engine import distributed
from memrl.rl.rollout import StepGroups, has_signal
from memrl.types import Trajectory, Turn

# A sum and the number that divides it; None if the sum itself is the metric, which is a count then.
Fraction = tuple[float, int | None]


def rollout_metrics(step_groups: StepGroups, rl: RLOptions, reward: RewardOptions) -> dict[str, float]:
    """Means over everything that all ranks sampled, including groups that dynamic sampling replaced."""
    groups = step_groups.kept + step_groups.replaced
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    kept = [trajectory for group in step_groups.kept for trajectory in group.trajectories]
    scored = [trajectory for trajectory in trajectories if not trajectory.left_out]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    kinds = _of_all_ranks({turn.kind for turn in turns}, first=("memory", "answer"))
    by_kind = {kind: [turn for turn in turns if turn.kind == kind] for kind in kinds}
    numbers = [trajectory.scores for trajectory in trajectories]
    names = _of_all_ranks({name for scores in numbers for name in scores} - {"strict", "lenient", "reward"})
    by_name = {name: [scores[name] for scores in numbers if name in scores] for name in names}
    return means_over_ranks(
        {
            "reward/mean": (sum(t.reward for t in scored), len(scored)),
            "reward/penalty": (sum(t.penalty for t in kept), len(kept)),
            "reward/strict": (sum(t.scores["strict"] for t in trajectories), len(trajectories)),
            "reward/lenient": (sum(t.scores["lenient"] for t in trajectories), len(trajectories)),
            "reward/errors": (sum(bool(t.error) for t in trajectories), None),
            **({"reward/turn_mean": _turn_rewards(scored)} if rl.outcome_weight < 1 or reward.turns != "none" else {}),
            "reward/signal": (sum(has_signal(group, rl) for group in groups), len(groups)),
            "reward/replaced_groups": (len(step_groups.replaced), None),
            "rollout/turns": (len(turns), None),
            "rollout/prompt_tokens": (sum(len(t.prompt_ids) for t in turns), len(turns)),
            "rollout/response_tokens": _response_tokens(turns),
            **{f"rollout/{kind}_tokens": _response_tokens(found) for kind, found in by_kind.items()},
            "rollout/truncated": truncated(turns),
            **{f"rollout/truncated_{kind}": truncated(found) for kind, found in by_kind.items()},
            **{f"scores/{name}": (sum(values), len(values)) for name, values in by_name.items()},
        }
    )


def _of_all_ranks(names: set[str], first: Sequence[str] = ()) -> list[str]:
    """The names that any rank has, in the same order on every rank. Collective."""
    every = set(distributed.gather_lists(sorted(names)))
    return [name for name in first if name in every] + sorted(every.difference(first))


def update_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """One record from the records of a step's updates; empty if no update had a token."""
    if not updates:
        return {}

    def mean(name: str) -> float:
        return sum(update[name] for update in updates) / len(updates)

    first = updates[0]
    token_means = ["pg_loss", "kl", "entropy", "approx_kl", "ratio", "clip_frac", "dual_clip_frac", "correction"]
    return {
        "rollout/logprob_diff_mean": first["logprob_diff"],
        "rollout/logprob_diff_max": first["logprob_diff_max"],
        "rollout/mismatch_kl": first["mismatch_kl"],
        **{f"loss/{name}": mean(name) for name in token_means if name in first},
        "optim/grad_norm": mean("grad_norm"),
        "optim/lr": updates[-1]["lr"],
        "optim/updates": len(updates),
        "optim/skipped": sum(not math.isfinite(update["grad_norm"]) for update in updates),
        "update/tokens": mean("tokens"),
        "update/turns": mean("turns"),
    }


def means_over_ranks(fractions: dict[str, Fraction]) -> dict[str, float]:
    """Each sum over all ranks, divided by the sum of its divisors; NaN if that is 0. Collective; all ranks give equal names."""
    pairs = torch.tensor([(value, divisor or 0) for value, divisor in fractions.values()], dtype=torch.float64)
    totals = distributed.sum_over_ranks(pairs).tolist()
    return {
        name: int(value) if divisor is None else value / total if total else math.nan
        for (name, (_, divisor)), (value, total) in zip(fractions.items(), totals, strict=True)
    }


def truncated(turns: list[Turn]) -> Fraction:
    """The turns that reached their token cap, of all."""
    return sum(turn.finish_reason == "length" for turn in turns), len(turns)


def _turn_rewards(trajectories: list[Trajectory]) -> Fraction:
    rewards = [turn.reward for trajectory in trajectories for turn in trajectory.turns]
    return sum(rewards), len(rewards)


def _response_tokens(turns: list[Turn]) -> Fraction:
    return sum(len(turn.response_ids) for turn in turns), len(turns)
