"""The bench answered without a model: `oracle` reads the document by the forms of its sentences, `chance` guesses.

On documents of other tasks both fail, since they do not know the answers' form.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from memrl.agents import AgentConfig
from memrl.data.bench.answers import chance_answer, oracle_answer
from memrl.types import Sample, Trajectory
from memrl.utils.seeds import stable_id

if TYPE_CHECKING:
    from memrl.llm import Session


async def oracle_agent(llm: Session, sample: Sample, config: AgentConfig) -> Trajectory:
    """The right answer, from question and document alone; shows that the document has it."""
    return Trajectory(response=oracle_answer(sample.question, sample.context))


async def chance_agent(llm: Session, sample: Sample, config: AgentConfig) -> Trajectory:
    """An answer of the right form, drawn without the document."""
    return Trajectory(response=chance_answer(sample.question, random.Random(stable_id("chance", sample.id))))
