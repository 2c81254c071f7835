"""The bench answered without a model: `oracle` reads the document by the forms of its sentences, `chance` guesses.

On documents of other tasks both fail, since they do not know the answers' form.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from memrl.agents.agent_config import AgentConfig
from memrl.data.bench.answers import chance_answer, oracle_answer
from memrl.types import Sample, Trajectory
from memrl.utils.seeds import stable_id


@dataclass(frozen=True)
class BaselineConfig:
    """A baseline has no settings; the agent is the one that it is compared with."""

    agent: AgentConfig


def oracle(sample: Sample) -> Trajectory:
    """The right answer, from question and document alone; shows that the document has it."""
    return Trajectory(response=oracle_answer(sample.question, sample.context))


def chance(sample: Sample) -> Trajectory:
    """An answer of the right form, drawn without the document."""
    return Trajectory(response=chance_answer(sample.question, random.Random(stable_id("chance", sample.id))))


BASELINES: dict[str, Callable[[Sample], Trajectory]] = {"oracle": oracle, "chance": chance}
