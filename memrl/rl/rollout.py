"""Trajectories from the current policy, and the training turns that they become."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from memrl.agents import AgentConfig, memory_agent
from memrl.config import RLOptions
from memrl.data.training_source import Source
from memrl.llm import LocalLLM
from memrl.rl.advantage import credit_shares, group_advantages
from memrl.rl.overlong import trajectory_penalty
from memrl.rl.packing import TrainTurn
from memrl.scoring.reward_pool import RewardPool
from memrl.types import Group, Sample, Trajectory


@dataclass
class Collected:
    """What one step's rollouts brought.

    Attributes:
        groups: those to train on, one per question of the step.
        replaced: groups without signal that fresh ones stand for (dynamic sampling).
    """

    groups: list[Group]
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
    slots: Iterable[int],
) -> Collected:
    """Groups for the step's questions number `slots`.

    With `dynamic_rounds` a group without signal gives its place to a fresh question, again and again up to the limit (dynamic
    sampling, DAPO, arXiv 2503.14476, section 3.2). Which question stands in at which place is a function of (seed, step, slot,
    round), so there is no cursor to save and the number of ranks does not show.
    """
    held: dict[int, Group] = {}
    replaced = []
    wanted = list(slots)
    for round_number in range(rl.dynamic_rounds + 1):
        first = round_number * rl.prompts_per_step
        samples = {first + slot: source.sample(step, slot, round_number) for slot in wanted}
        for group in collect_groups(llm, samples, agent, rewards, group_size=rl.group_size, seed=seed, step=step):
            group.id -= first
            if group.id in held:
                replaced.append(held[group.id])
            held[group.id] = group
        wanted = [slot for slot in wanted if not has_signal(held[slot])]
        if not wanted:
            break
    return Collected([held[slot] for slot in sorted(held)], replaced)


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
    """Let the agent read every sample `group_size` times, all at once, and score each trajectory as it ends.

    A trajectory's randomness is a function of (seed, step, group id, rollout), so it is the same on whichever rank it runs.

    Args:
        samples: by group id.
    """

    async def rollout(group_id: int, sample: Sample, index: int) -> Trajectory:
        trajectory = await memory_agent(llm.session(seed, step, group_id, index), sample, agent)
        await rewards.score(trajectory, sample)
        return trajectory

    keys = [(group_id, index) for group_id in samples for index in range(group_size)]
    trajectories = llm.run(
        (rollout(group_id, samples[group_id], index) for group_id, index in keys), concurrency=max(1, len(keys))
    )
    by_key = dict(zip(keys, trajectories, strict=True))
    return [
        Group(group_id, sample, [by_key[group_id, index] for index in range(group_size)]) for group_id, sample in samples.items()
    ]


def has_signal(group: Group) -> bool:
    """Whether the rewards differ, before any shaping: if not, every advantage is zero."""
    return len({trajectory.reward for trajectory in group.trajectories}) > 1


def assign_advantages(groups: list[Group], rl: RLOptions, agent: AgentConfig) -> dict[int, list[TrainTurn]]:
    """Each group's training turns, by group id; sets every trajectory's `penalty` and `advantage`.

    One advantage per trajectory, from its reward less what overlong turns cost it. `rl.credit` says what part of it each turn
    carries. Left out are groups without signal (`drop_flat_groups`, and always with dynamic sampling) and turns that their cap
    ended (`overlong_filter`); a group that is left out has an empty list.
    """
    caps = {"memory": agent.memory_tokens, "answer": agent.answer_tokens}
    buffers = {"memory": rl.overlong_buffer_memory, "answer": rl.overlong_buffer_answer}
    filtered = {"none": (), "all": tuple(caps)}.get(rl.overlong_filter, (rl.overlong_filter,))
    drop_flat = rl.drop_flat_groups or rl.dynamic_rounds > 0
    trajectories = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    if not trajectories:
        return {}
    for _, trajectory in trajectories:
        kinds = [turn.kind for turn in trajectory.turns]
        lengths = [len(turn.response_ids) for turn in trajectory.turns]
        trajectory.penalty = rl.overlong_penalty * trajectory_penalty(kinds, lengths, caps, buffers)
    rewards = torch.tensor([trajectory.reward + trajectory.penalty for _, trajectory in trajectories])
    group_ids = torch.tensor([group.id for group, _ in trajectories])
    advantages = group_advantages(rewards, group_ids, rl.normalize_std, rl.baseline).tolist()
    flat = {group.id for group in groups if not has_signal(group)}
    turns: dict[int, list[TrainTurn]] = {group.id: [] for group in groups}
    for number, ((group, trajectory), advantage) in enumerate(zip(trajectories, advantages, strict=True)):
        trajectory.advantage = advantage
        if drop_flat and group.id in flat:
            continue
        shares = credit_shares(len(trajectory.turns), rl.credit)
        for turn, share in zip(trajectory.turns, shares, strict=True):
            if not (turn.kind in filtered and turn.finish_reason == "length"):
                turns[group.id].append(TrainTurn(turn, advantage * share, group.id, number))
    return turns
