"""How good is an agent, by document length? Tasks, the runner, results that survive a kill, tables, plots."""

from memrl.evaluation.results import Results, fingerprint
from memrl.evaluation.runner import evaluate
from memrl.evaluation.summary import print_table, summarize, wilson_interval, write_summary
from memrl.evaluation.tasks import Task, make_task, parse_lengths

__all__ = [
    "Results",
    "Task",
    "evaluate",
    "fingerprint",
    "make_task",
    "parse_lengths",
    "print_table",
    "summarize",
    "wilson_interval",
    "write_summary",
]
