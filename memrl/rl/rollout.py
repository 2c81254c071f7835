"""Sample trajectories from the current policy, and turn them into training turns."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from memrl.agents import AgentConfig, run_agent
from memrl.config import RLOptions
from memrl.data.training_source import Source
from memrl.llm import LocalLLM
from memrl.rl.advantage import credit_shares, group_advantages
from memrl.rl.overlong import trajectory_penalty
from memrl.rl.packing import TrainTurn
from memrl.scoring.reward_pool import RewardPool
from memrl.types import Group, Sample, Trajectory
from memrl.utils.plain_text import reason_of


@dataclass
class StepGroups:
    """The groups that were sampled in one step.

    Attributes:
        kept: one for each question index of the step; these are trained on.
        replaced: groups without signal that dynamic sampling replaced.
    """

    kept: list[Group]
    replaced: list[Group]


def collect_step(
    llm: LocalLLM,
    source: Source,
    agent: AgentConfig,
    rewards: RewardPool,
    rl: RLOptions,
    *,
    seed: int,
    step: int,
    question_indices: Iterable[int],
) -> StepGroups:
    """Sample a group for each of the step's questions with the given indices, 0 to prompts_per_step - 1.

    With `dynamic_rounds` a group without signal is replaced by the group of another question, again and again up to that many
    times (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2). The other question is a function of (seed, step, index, round),
    so there is no cursor to save, and the result does not depend on the number of ranks.
    """
    kept: dict[int, Group] = {}
    replaced = []
    flat = list(question_indices)
    for round_number in range(rl.dynamic_rounds + 1):
        # Each round samples under group ids of its own, because a trajectory's random numbers depend on the id.
        offset = round_number * rl.prompts_per_step
        samples = {offset + index: source.sample(step, index, round_number) for index in flat}
        for group in collect_groups(llm, samples, agent, rewards, group_size=rl.group_size, seed=seed, step=step):
            group.id -= offset
            if group.id in kept:
                replaced.append(kept[group.id])
            kept[group.id] = group
        flat = [index for index in flat if not has_signal(kept[index])]
        if not flat:
            break
    return StepGroups([kept[index] for index in sorted(kept)], replaced)


def collect_groups(
    llm: LocalLLM,
    samples: dict[int, Sample],
    agent: AgentConfig,
    rewards: RewardPool,
    *,
    group_size: int,
    seed: int,
    step: int,
) -> list[Group]:
    """Run the agent `group_size` times on every sample, all concurrently, and score each trajectory as it ends.

    A trajectory's random numbers are a function of (seed, step, group id, rollout index), so they are the same on any rank.

    Args:
        samples: by group id.
    """

    async def rollout(group_id: int, index: int) -> Trajectory:
        sample = samples[group_id]
        try:
            trajectory = await run_agent(llm.session(seed, step, group_id, index), sample, agent)
        except Exception as error:  # one broken trajectory does not end the run; a step without any other ends it
            return rewards.leave_out(f"agent {agent.function}: {reason_of(error)}")
        await rewards.score(trajectory, sample)
        return trajectory

    keys = [(group_id, index) for group_id in samples for index in range(group_size)]
    trajectories = iter(llm.run((rollout(*key) for key in keys), concurrency=max(1, len(keys))))
    return [Group(group_id, sample, [next(trajectories) for _ in range(group_size)]) for group_id, sample in samples.items()]


def with_reward(group: Group) -> list[Trajectory]:
    """The trajectories that are compared with each other: all but those whose reward failed (`reward.on_error` skip)."""
    return [trajectory for trajectory in group.trajectories if not trajectory.left_out]


def has_signal(group: Group) -> bool:
    """Whether the rewards differ, before any penalty. Without a difference every advantage is zero."""
    return len({trajectory.reward for trajectory in with_reward(group)}) > 1


def assign_advantages(groups: list[Group], rl: RLOptions) -> dict[int, list[TrainTurn]]:
    """Each group's training turns, by group id; sets every trajectory's `penalty` and `advantage`.

    The advantage of a trajectory comes from its reward plus its overlong penalty; `rl.credit` sets the share of it on each turn.
    Left out are: trajectories whose reward failed, and groups with fewer than two others, which have no baseline; groups without
    signal with `drop_flat_groups` and with dynamic sampling (with `denominator` all they stay, to be counted only); turns that
    reached their token cap with `overlong_filter`. A group that is left out has an empty list, a trajectory advantage 0.
    """
    drop_flat = rl.drop_flat_groups or rl.dynamic_rounds > 0
    turns: dict[int, list[TrainTurn]] = {group.id: [] for group in groups}
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        trajectory.penalty = rl.overlong_penalty * trajectory_penalty(trajectory.turns, rl.overlong_buffers)
        trajectory.advantage = 0.0
    compared = [(group, trajectory) for group in groups if len(own := with_reward(group)) > 1 for trajectory in own]
    if not compared:
        return turns
    rewards = torch.tensor([trajectory.reward + trajectory.penalty for _, trajectory in compared])
    group_ids = torch.tensor([group.id for group, _ in compared])
    advantages = group_advantages(rewards, group_ids, rl.normalize_std, rl.baseline).tolist()
    for trajectory_id, ((group, trajectory), advantage) in enumerate(zip(compared, advantages, strict=True)):
        trajectory.advantage = advantage
        is_dropped = drop_flat and not has_signal(group)
        if is_dropped and rl.denominator == "kept":
            continue
        shares = credit_shares(len(trajectory.turns), rl.credit)
        for turn, share in zip(trajectory.turns, shares, strict=True):
            is_filtered = turn.kind in rl.overlong_filter or "all" in rl.overlong_filter
            if not (is_filtered and turn.finish_reason == "length"):
                train_turn = TrainTurn(turn, advantage * share, group.id, trajectory_id, only_counted=is_dropped)
                turns[group.id].append(train_turn)
    return turns
