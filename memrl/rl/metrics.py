"""What is logged of a step, from sums and counts over all ranks, so that the number of ranks does not show.

Every name with its formula: docs/metrics.md.
"""

import math

import torch

from memrl.engine import distributed
from memrl.rl.rollout import Collected, has_signal
from memrl.types import Turn


def rollout_metrics(collected: Collected) -> dict[str, float]:
    """Means over what all ranks have sampled, groups that dynamic sampling replaced included."""
    groups = collected.groups + collected.replaced
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    memory, answer = ([turn for turn in turns if turn.kind == kind] for kind in ("memory", "answer"))
    sums = {
        "trajectories": len(trajectories),
        "reward": sum(t.reward for t in trajectories),
        "kept": sum(len(group.trajectories) for group in collected.groups),
        "penalty": sum(t.penalty for group in collected.groups for t in group.trajectories),
        "strict": sum(t.scores["strict"] for t in trajectories),
        "lenient": sum(t.scores["lenient"] for t in trajectories),
        "errors": sum(bool(t.error) for t in trajectories),
        "groups": len(groups),
        "signal": sum(map(has_signal, groups)),
        "replaced": len(collected.replaced),
        "turns": len(turns),
        "prompt": sum(len(t.prompt_ids) for t in turns),
        "memory_turns": len(memory),
        "answer_turns": len(answer),
        "memory_tokens": _response_tokens(memory),
        "answer_tokens": _response_tokens(answer),
        "response": _response_tokens(turns),
        "memory_truncated": _truncated(memory),
        "answer_truncated": _truncated(answer),
        "truncated": _truncated(turns),
    }
    total = sum_by_name(sums)

    def mean(name: str, over: str) -> float:
        return total[name] / max(1.0, total[over])

    return {
        "reward/mean": mean("reward", "trajectories"),
        "reward/penalty": mean("penalty", "kept"),
        "reward/strict": mean("strict", "trajectories"),
        "reward/lenient": mean("lenient", "trajectories"),
        "reward/errors": int(total["errors"]),
        "reward/signal": mean("signal", "groups"),
        "reward/replaced_groups": int(total["replaced"]),
        "rollout/turns": int(total["turns"]),
        "rollout/prompt_tokens": mean("prompt", "turns"),
        "rollout/response_tokens": mean("response", "turns"),
        "rollout/memory_tokens": mean("memory_tokens", "memory_turns"),
        "rollout/answer_tokens": mean("answer_tokens", "answer_turns"),
        "rollout/truncated": mean("truncated", "turns"),
        "rollout/truncated_memory": mean("memory_truncated", "memory_turns"),
        "rollout/truncated_answer": mean("answer_truncated", "answer_turns"),
    }


def update_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """One step's updates to one record; empty when no update had a token."""
    if not updates:
        return {}

    def mean(name: str) -> float:
        return sum(update[name] for update in updates) / len(updates)

    first = updates[0]
    rollout = {
        "rollout/logprob_diff_mean": first["logprob_diff"],
        "rollout/logprob_diff_max": first["logprob_diff_max"],
        "rollout/mismatch_kl": first["mismatch_kl"],
    }
    token_means = ["pg_loss", "kl", "entropy", "approx_kl", "ratio", "clip_frac", "dual_clip_frac", "correction"]
    return rollout | {
        **{f"loss/{name}": mean(name) for name in token_means if name in first},
        "optim/grad_norm": mean("grad_norm"),
        "optim/lr": updates[-1]["lr"],
        "optim/updates": len(updates),
        "optim/skipped": sum(not math.isfinite(update["grad_norm"]) for update in updates),
        "update/tokens": mean("tokens"),
        "update/turns": mean("turns"),
    }


def sum_by_name(values: dict[str, float]) -> dict[str, float]:
    """Each value's sum over all ranks; the names must be the same everywhere. Collective."""
    sums = distributed.sum_over_ranks(torch.tensor(list(values.values()), dtype=torch.float64))
    return dict(zip(values, sums.tolist(), strict=True))


def _response_tokens(turns: list[Turn]) -> int:
    return sum(len(turn.response_ids) for turn in turns)


def _truncated(turns: list[Turn]) -> int:
    return sum(turn.finish_reason == "length" for turn in turns)
