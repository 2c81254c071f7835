"""How good is a model, by method and document length? Tasks, the runner, results that survive a kill, tables, plots."""

from memrl.evaluation.eval_settings import fingerprint
from memrl.evaluation.results import RankResults, Results
from memrl.evaluation.runner import Key, all_keys, evaluate, read_all, row_key, share_of
from memrl.evaluation.summary import print_table, summarize, summarize_costs, wilson_interval, write_summary
from memrl.evaluation.tasks import Task, choose_lengths, make_tasks, parse_lengths

__all__ = [
    "Key",
    "RankResults",
    "Results",
    "Task",
    "all_keys",
    "choose_lengths",
    "evaluate",
    "fingerprint",
    "make_tasks",
    "parse_lengths",
    "print_table",
    "read_all",
    "row_key",
    "share_of",
    "summarize",
    "summarize_costs",
    "wilson_interval",
    "write_summary",
]
