"""Validation during training: the same agent on documents that are not trained on."""

import math
import time
from collections.abc import Sequence
from itertools import islice

from memrl.agents import AgentConfig, run_agent
from memrl.config import DataOptions, ValidationOptions
from memrl.data import load_samples
from memrl.data.generated import generator
from memrl.engine import distributed
from memrl.llm import LocalLLM
from memrl.rl.health import on_all_ranks
from memrl.rl.metrics import means_over_ranks, truncated
from memrl.scoring.reward_pool import RewardPool
from memrl.types import Sample, Trajectory
from memrl.utils.plain_text import reason_of
from memrl.utils.seeds import row_seed

STREAM = 7_000_003  # keeps documents and random numbers of validation apart from those of training and of the report


def validation_samples(options: ValidationOptions, data: DataOptions, seed: int, training: Sequence[Sample] = ()) -> list[Sample]:
    """The questions of every validation of a run; raises ValueError if the file cannot be read.

    Args:
        training: the samples of data.path; if validation.path is the same file, they are used instead of reading it again.
    """
    if options.path is None:
        return [generator(data.tasks, i)(data.max_chunks, row_seed(STREAM, seed, i)) for i in range(options.samples)]
    samples = training if training and options.path == data.path else load_samples(options.path, data.allow_files)
    return list(islice(samples, options.samples))


def validate_policy(
    llm: LocalLLM, samples: list[Sample], agent: AgentConfig, rewards: RewardPool, *, repeats: int, seed: int
) -> dict[str, float]:
    """Run the agent `repeats` times on every sample; each rank takes every world-size-th sample. Collective.

    The random numbers are the same in every validation, so that two validations differ by the weights alone.

    Returns:
        "reward": mean over the readings without those that `reward.on_error` leaves out, NaN if those are all; "reward_best": the
        mean over samples of their best one; "strict" and "lenient": means over all readings; "n": the number of readings;
        "errors": of those whose reward failed; "truncated": the fraction of turns that reached their token cap; "seconds".

    Raises:
        RunError: on every rank, if a sample cannot be read.
    """
    started = time.perf_counter()

    async def read(index: int, repeat: int) -> Trajectory:
        try:
            trajectory = await run_agent(llm.session(STREAM, seed, index, repeat), samples[index], agent)
        except Exception as error:
            return rewards.leave_out(f"agent {agent.function}: {reason_of(error)}")
        await rewards.score(trajectory, samples[index])
        return trajectory

    # All readings of a sample are on one rank, which finds the best of them.
    indices = range(distributed.rank(), len(samples), distributed.world_size())
    keys = [(index, repeat) for index in indices for repeat in range(repeats)]
    trajectories = on_all_ranks(lambda: llm.run(read(*key) for key in keys))
    best: dict[int, float] = {}
    for (index, _), trajectory in zip(keys, trajectories, strict=True):
        if not trajectory.left_out:
            best[index] = max(best.get(index, -math.inf), trajectory.reward)
    count, scored = len(trajectories), [trajectory for trajectory in trajectories if not trajectory.left_out]
    means = means_over_ranks(
        {
            "reward": (sum(t.reward for t in scored), len(scored)),
            "strict": (sum(t.scores["strict"] for t in trajectories), count),
            "lenient": (sum(t.scores["lenient"] for t in trajectories), count),
            "reward_best": (sum(best.values()), len(best)),
            "n": (count, None),
            "errors": (sum(bool(t.error) for t in trajectories), None),
            "truncated": truncated([turn for trajectory in trajectories for turn in trajectory.turns]),
        }
    )
    return means | {"seconds": time.perf_counter() - started}
