"""What is logged of a step, from sums and counts over all ranks, so that the number of ranks does not show.

    reward/strict, reward/lenient   mean over trajectories
    reward/signal                   part of the groups whose rewards are not all equal
    rollout/turns                   turns of all trajectories
    rollout/prompt_tokens           mean over turns
    rollout/response_tokens         mean over turns
    rollout/truncated               part of the turns that the token cap ended
    rollout/logprob_diff_mean, _max |trainer - sampler| log-probability on the step's first update, where both have equal weights
    loss/pg_loss, loss/kl, ...      token means (see `rl/loss.py`), averaged over the step's updates
    optim/grad_norm, optim/lr       mean over the step's updates; the last update's rate
    optim/skipped                   updates that DeepSpeed left out because the gradient was not finite
"""

import math

import torch

from memrl.rl import distributed
from memrl.types import Group


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Means over the trajectories and turns of all ranks."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    sums = torch.tensor(
        [
            len(trajectories),
            sum(t.scores["strict"] for t in trajectories),
            sum(t.scores["lenient"] for t in trajectories),
            len(groups),
            sum(len({t.reward for t in group.trajectories}) > 1 for group in groups),
            len(turns),
            sum(len(t.prompt_ids) for t in turns),
            sum(len(t.response_ids) for t in turns),
            sum(t.finish_reason == "length" for t in turns),
        ],
        dtype=torch.float64,
    )
    trajectory_count, strict, lenient, group_count, signal, turn_count, prompt, response, truncated = (
        distributed.sum_over_ranks(sums).tolist()
    )
    return {
        "reward/strict": strict / trajectory_count,
        "reward/lenient": lenient / trajectory_count,
        "reward/signal": signal / group_count,
        "rollout/turns": int(turn_count),
        "rollout/prompt_tokens": prompt / turn_count,
        "rollout/response_tokens": response / turn_count,
        "rollout/truncated": truncated / turn_count,
    }


def update_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """One step's updates to one record; empty when no update had a token."""
    if not updates:
        return {}

    def mean(name: str) -> float:
        return sum(update[name] for update in updates) / len(updates)

    token_means = ["pg_loss", "kl", "entropy", "approx_kl", "ratio", "clip_frac", "dual_clip_frac"]
    return {
        "rollout/logprob_diff_mean": updates[0]["logprob_diff"],
        "rollout/logprob_diff_max": updates[0]["logprob_diff_max"],
        **{f"loss/{name}": mean(name) for name in token_means if name in updates[0]},
        "optim/grad_norm": mean("grad_norm"),
        "optim/lr": updates[-1]["lr"],
        "optim/updates": len(updates),
        "optim/skipped": sum(not math.isfinite(update["grad_norm"]) for update in updates),
    }
