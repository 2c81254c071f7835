"""The records of rollouts.jsonl: sample trajectories of a step with all their texts."""

from collections.abc import Iterator

from memrl.config import RLOptions
from memrl.rl.rollout import has_signal
from memrl.tokenizer import Tokenizer
from memrl.types import Group, Trajectory, Turn


def rollout_records(step: int, groups: list[Group], count: int, tokenizer: Tokenizer, rl: RLOptions) -> Iterator[dict]:
    """Up to `count` trajectories of the first group with signal: the best, the worst, the second best, and so on.

    Best and worst side by side show what made the difference. Those without a reward come last.
    """
    group = next((group for group in groups if has_signal(group, rl)), groups[0])
    failed = [index for index, trajectory in enumerate(group.trajectories) if trajectory.left_out]
    others = [index for index, trajectory in enumerate(group.trajectories) if not trajectory.left_out]
    ranked = sorted(others, key=lambda index: -group.trajectories[index].reward)
    order = [ranked[place // 2] if place % 2 == 0 else ranked[-1 - place // 2] for place in range(len(ranked))]
    for index in (order + failed)[:count]:
        trajectory = group.trajectories[index]
        yield {
            "step": step,
            "sample": group.sample.id,
            "question": group.sample.question,
            "answers": list(group.sample.answers),
            "match": group.sample.match,
            "group": group.id,
            "rollout": index,
            "reward": _reward(trajectory),
            **{name: getattr(trajectory, name) for name in ("penalty", "advantage", "scores", "error")},
            "group_rewards": [_reward(t) for t in group.trajectories],
            "turns": [_turn_record(turn, tokenizer) for turn in trajectory.turns],
        }


def _reward(trajectory: Trajectory) -> float | None:
    return None if trajectory.left_out else trajectory.reward


def _turn_record(turn: Turn, tokenizer: Tokenizer) -> dict:
    return {
        "kind": turn.kind,
        "prompt": tokenizer.decode(turn.prompt_ids),
        "response": turn.text,
        "prompt_tokens": len(turn.prompt_ids),
        "response_tokens": len(turn.response_ids),
        "finish_reason": turn.finish_reason,
        "reward": turn.reward,
        "advantage": turn.advantage,
    }
