"""Fourteen English tasks in the manner of four benchmarks, at an exact number of tokens. docs/long_tasks.md describes them.

State tracking (BABILong, arXiv 2406.10149), the n-th request (MRCR, arXiv 2409.12640), fact consolidation (MemoryAgentBench,
arXiv 2507.05257) and aggregation (OOLONG, arXiv 2511.02817). All sentences and names are made here; nothing is copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memrl.data.ruler import RulerFiles
    from memrl.data.ruler.task import SyntheticTask
    from memrl.tokenizer import Tokenizer

FAMILIES = {
    "state_tracking": ("1", "2", "3", "yes_no", "count", "list"),
    "nth_request": ("2", "4", "8"),
    "fact_consolidation": ("single", "multi"),
    "aggregation": ("count", "most", "compare"),
}
TASKS = tuple(f"{family}_{kind}" for family, kinds in FAMILIES.items() for kind in kinds)
# The names that stand for several tasks: a family's, and `long_tasks` for all.
GROUPS = {family: tuple(f"{family}_{kind}" for kind in kinds) for family, kinds in FAMILIES.items()} | {"long_tasks": TASKS}


def make_long_task(name: str, tokenizer: Tokenizer, files: RulerFiles) -> SyntheticTask:
    """A task by name.

    Args:
        files: its `essays`, if given, are the text around the sentences of state tracking; else a few lines, repeated.

    Raises:
        ValueError: an unknown task, or the essays cannot be read.
    """
    from memrl.data.longtasks.fact_consolidation import FactConsolidation
    from memrl.data.longtasks.labelled_entries import Aggregation
    from memrl.data.longtasks.nth_request import NthRequest
    from memrl.data.longtasks.state_tracking import StateTracking

    if name not in TASKS:
        raise ValueError(f"there is no long task {name!r}; the tasks are {', '.join(TASKS)}")
    if name in GROUPS["state_tracking"]:
        return StateTracking(name, tokenizer, files.essays)
    classes = {"nth_request": NthRequest, "fact_consolidation": FactConsolidation, "aggregation": Aggregation}
    return classes[name.rpartition("_")[0]](name, tokenizer)
