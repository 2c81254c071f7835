"""Sample trajectories from the current policy, and turn them into training turns."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from memrl.agents import AgentConfig, run_agent
from memrl.config import RLOptions
from memrl.data.training_source import Source
from memrl.llm import LocalLLM
from memrl.rl.advantage import credit_shares, group_advantages
from memrl.rl.overlong import trajectory_penalty
from memrl.rl.packing import TrainTurn
from memrl.rl.turn_advantage import mixed_advantage, turn_advantages, turn_places, turn_returns
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
    reward_turns: Callable[[list[Group]], None] = lambda groups: None,
) -> StepGroups:
    """Sample a group for each of the step's questions with the given indices, 0 to prompts_per_step - 1.

    With `dynamic_rounds` a group without signal is replaced by the group of another question, again and again up to that many
    times (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2). The other question is a function of (seed, step, index, round),
    so there is no cursor to save, and the result does not depend on the number of ranks.

    Args:
        reward_turns: called with the groups of each round, before any of them is replaced; may change the rewards of their turns.
    """
    kept: dict[int, Group] = {}
    replaced = []
    flat = list(question_indices)
    for round_number in range(rl.dynamic_rounds + 1):
        # Each round samples under group ids of its own, because a trajectory's random numbers depend on the id.
        offset = round_number * rl.prompts_per_step
        samples = {offset + index: source.sample(step, index, round_number) for index in flat}
        groups = collect_groups(llm, samples, agent, rewards, group_size=rl.group_size, seed=seed, step=step)
        reward_turns(groups)
        for group in groups:
            group.id -= offset
            if group.id in kept:
                replaced.append(kept[group.id])
            kept[group.id] = group
        flat = [index for index in flat if not has_signal(kept[index], rl)]
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


def has_signal(group: Group, rl: RLOptions) -> bool:
    """Whether anything that is trained on differs, before any penalty. Without a difference every advantage is zero.

    It is the rewards if `rl.outcome_weight` is above 0, and the turns' returns at a place if it is below 1.
    """
    compared = with_reward(group)
    if rl.outcome_weight > 0 and len({trajectory.reward for trajectory in compared}) > 1:
        return True
    return any(advantage != 0 for row in own_turn_advantages(compared, rl) for advantage in row)


def own_turn_advantages(trajectories: list[Trajectory], rl: RLOptions) -> list[list[float]]:
    """A_turn of all turns of a group's trajectories, from the turns' own rewards; zeros if `rl.outcome_weight` is 1."""
    if rl.outcome_weight == 1:
        return [[0.0] * len(trajectory.turns) for trajectory in trajectories]
    places = [turn_places([turn.kind for turn in trajectory.turns]) for trajectory in trajectories]
    rewards = [[turn.reward for turn in trajectory.turns] for trajectory in trajectories]
    returns = [turn_returns(row, rl.turn_return, rl.turn_discount) for row in rewards]
    return turn_advantages(places, returns, rl.normalize_std, rl.baseline)


def assign_advantages(groups: list[Group], rl: RLOptions) -> dict[int, list[TrainTurn]]:
    """Each group's training turns, by group id; sets the `penalty` of every trajectory and the `advantage` of it and its turns.

    The advantage of a trajectory comes from its reward plus its overlong penalty; `rl.credit` sets the share of it on each turn.
    With `rl.outcome_weight` below 1 each turn's own advantage is mixed in.
    Left out are: trajectories whose reward failed, and groups with fewer than two others, which have no baseline; groups without
    signal with `drop_flat_groups` and with dynamic sampling (with `denominator` all they stay, to be counted only); turns that
    reached their token cap with `overlong_filter`. A group that is left out has an empty list, a trajectory advantage 0.
    """
    drop_flat = rl.drop_flat_groups or rl.dynamic_rounds > 0
    turns: dict[int, list[TrainTurn]] = {group.id: [] for group in groups}
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        trajectory.penalty = rl.overlong_penalty * trajectory_penalty(trajectory.turns, rl.overlong_buffers)
        trajectory.advantage = 0.0
        for turn in trajectory.turns:
            turn.advantage = 0.0
    compared = [group for group in groups if len(with_reward(group)) > 1]
    set_advantages(compared, rl)
    trained = [(group, trajectory) for group in compared for trajectory in with_reward(group)]
    dropped = {group.id for group in groups if drop_flat and not has_signal(group, rl)}
    for trajectory_id, (group, trajectory) in enumerate(trained):
        is_dropped = group.id in dropped
        if is_dropped and rl.denominator == "kept":
            continue
        for turn in trajectory.turns:
            is_filtered = turn.kind in rl.overlong_filter or "all" in rl.overlong_filter
            if not (is_filtered and turn.finish_reason == "length"):
                train_turn = TrainTurn(turn, turn.advantage, group.id, trajectory_id, only_counted=is_dropped)
                turns[group.id].append(train_turn)
    return turns


def set_advantages(groups: list[Group], rl: RLOptions) -> None:
    """Set `advantage` of each trajectory with a reward and of its turns, in groups that have at least two of them."""
    if not groups:
        return
    compared = [(group.id, trajectory) for group in groups for trajectory in with_reward(group)]
    rewards = torch.tensor([trajectory.reward + trajectory.penalty for _, trajectory in compared])
    group_ids = torch.tensor([group_id for group_id, _ in compared])
    advantages = group_advantages(rewards, group_ids, rl.normalize_std, rl.baseline).tolist()
    own = [row for group in groups for row in own_turn_advantages(with_reward(group), rl)]
    for (_, trajectory), advantage, of_turns in zip(compared, advantages, own, strict=True):
        trajectory.advantage = advantage
        shares = credit_shares(len(trajectory.turns), rl.credit)
        for turn, share, of_turn in zip(trajectory.turns, shares, of_turns, strict=True):
            outcome = advantage * share
            turn.advantage = outcome if rl.outcome_weight == 1 else mixed_advantage(outcome, of_turn, rl.outcome_weight)
