"""Trajectories from the current policy, and the training turns that they become."""

import torch

from memrl.agents import AgentConfig, memory_agent
from memrl.llm import LocalLLM
from memrl.rewards import score
from memrl.rl.advantage import group_advantages
from memrl.rl.packing import TrainTurn
from memrl.types import Group, Sample, Trajectory


def collect_groups(
    llm: LocalLLM, samples: dict[int, Sample], agent: AgentConfig, *, group_size: int, seed: int, step: int
) -> list[Group]:
    """Let the agent read every sample `group_size` times, all at once, and score the trajectories.

    A trajectory's randomness is a function of (seed, step, group id, rollout), so it is the same on whichever rank it runs.

    Args:
        samples: by group id.
    """

    async def rollout(group_id: int, sample: Sample, index: int) -> Trajectory:
        trajectory = await memory_agent(llm.session(seed, step, group_id, index), sample, agent)
        score(trajectory, sample)
        return trajectory

    keys = [(group_id, index) for group_id in samples for index in range(group_size)]
    trajectories = llm.run(
        (rollout(group_id, samples[group_id], index) for group_id, index in keys), concurrency=len(keys)
    )
    by_key = dict(zip(keys, trajectories, strict=True))
    return [
        Group(group_id, sample, [by_key[group_id, index] for index in range(group_size)])
        for group_id, sample in samples.items()
    ]


def assign_advantages(
    groups: list[Group], *, normalize_std: bool = False, credit: str = "broadcast", drop_flat_groups: bool = False
) -> dict[int, list[TrainTurn]]:
    """Each group's training turns, by group id.

    One advantage per trajectory, A_i = R_i - mean(R of its group), falls on all turns of the trajectory ("broadcast", as in the
    paper) or on its answer turn alone while the memory turns get 0 ("final_only").

    Args:
        drop_flat_groups: give groups whose rewards are all equal no turns.
    """
    trajectories = [(group.id, trajectory) for group in groups for trajectory in group.trajectories]
    if not trajectories:
        return {}
    rewards = torch.tensor([trajectory.reward for _, trajectory in trajectories])
    group_ids = torch.tensor([group_id for group_id, _ in trajectories])
    advantages = group_advantages(rewards, group_ids, normalize_std).tolist()
    turns: dict[int, list[TrainTurn]] = {group.id: [] for group in groups}
    flat = {group.id for group in groups if len({t.reward for t in group.trajectories}) == 1}
    for (group_id, trajectory), advantage in zip(trajectories, advantages, strict=True):
        if drop_flat_groups and group_id in flat:
            continue
        last = len(trajectory.turns) - 1
        for index, turn in enumerate(trajectory.turns):
            carries = credit == "broadcast" or index == last
            turns[group_id].append(TrainTurn(turn, advantage if carries else 0.0))
    return turns
