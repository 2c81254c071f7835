"""Validation during training: the same agent, other documents."""

import math
import time
from collections.abc import Sequence

from memrl.agents import AgentConfig, memory_agent
from memrl.config import TrainConfig
from memrl.data import load_samples
from memrl.data.needle import make_sample
from memrl.engine import distributed
from memrl.llm import LocalLLM
from memrl.rl.metrics import sum_by_name
from memrl.scoring.reward_pool import RewardPool
from memrl.types import Sample, Trajectory
from memrl.utils.seeds import row_seed

STREAM = 7_000_003  # documents and draws of validation, training and the report never coincide


def validation_samples(config: TrainConfig, training: Sequence[Sample] = ()) -> list[Sample]:
    """The questions that every validation of a run asks; raises ValueError where the file cannot be read.

    Args:
        training: the samples of data.path, which are taken where validation.path is the same file: it need not be checked twice.
    """
    options = config.validation
    if options.path is not None:
        samples = training if training and options.path == config.data.path else load_samples(options.path)
        return samples[: options.samples]
    return [make_sample(config.data.max_chunks, row_seed(STREAM, config.seed, i)) for i in range(options.samples)]


def validate_policy(
    llm: LocalLLM, samples: list[Sample], agent: AgentConfig, rewards: RewardPool, *, repeats: int, seed: int
) -> dict[str, float]:
    """Let the agent read every sample `repeats` times. Collective: ranks take every world-size-th reading.

    The draws are the same at every validation, so that two of them differ by the weights alone.

    Returns:
        "reward", "strict" and "lenient", means over the readings; "reward_best", the mean over samples of their best reading;
        "n", the readings; "truncated", the part of the turns that their cap ended; "seconds".
    """
    started = time.perf_counter()

    async def read(index: int, repeat: int) -> Trajectory:
        trajectory = await memory_agent(llm.session(STREAM, seed, index, repeat), samples[index], agent)
        await rewards.score(trajectory, samples[index])
        return trajectory

    keys = [(index, repeat) for index in range(len(samples)) for repeat in range(repeats)]
    # Whole samples stay on one rank, for the best of their readings.
    mine = [key for key in keys if key[0] % distributed.world_size() == distributed.rank()]
    trajectories = llm.run(read(*key) for key in mine)
    best: dict[int, float] = {}
    for (index, _), trajectory in zip(mine, trajectories, strict=True):
        best[index] = max(best.get(index, -math.inf), trajectory.reward)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    total = sum_by_name(
        {
            "reward": sum(t.reward for t in trajectories),
            "strict": sum(t.scores["strict"] for t in trajectories),
            "lenient": sum(t.scores["lenient"] for t in trajectories),
            "best": sum(best.values()),
            "truncated": sum(turn.finish_reason == "length" for turn in turns),
            "turns": len(turns),
        }
    )
    return {
        "reward": total["reward"] / len(keys),
        "strict": total["strict"] / len(keys),
        "lenient": total["lenient"] / len(keys),
        "reward_best": total["best"] / len(samples),
        "n": len(keys),
        "truncated": total["truncated"] / max(1.0, total["turns"]),
        "seconds": time.perf_counter() - started,
    }
