"""The options of `memrl eval`. Annotations are not postponed here: see `memrl.utils.command_line`."""

from dataclasses import dataclass
from typing import Literal

from memrl.utils.bounds import bounded
from memrl.utils.command_line import allow_files_flag


@dataclass
class Options:
    """What to measure."""

    model: str
    """Hugging Face folder of the model; with --endpoint the model's name on the server."""
    task: str = "needle"
    """needle; bench (all of its 5 tasks, or one by name, such as bench_two_hop); ruler (all of its 13 tasks, or one by name);
    ruler_hotpotqa; long_tasks (state_tracking, nth_request, fact_consolidation and aggregation, or one of their 14 tasks by
    name); or the path of a .jsonl, .json or .parquet file; several separated by commas."""
    lengths: str | None = None
    """Document lengths such as 1,4,16 or 8k,1m: chunks for needle (1,4,16 if not given) and for the bench read by a miniature
    (4,16,64), tokens for RULER's and the long tasks and for the bench in English (8k,16k,32k), documents for ruler_hotpotqa
    (50,100,200). Documents of files keep their length."""
    methods: str | None = None
    """memory (reads chunk by chunk), one_shot (the whole document in the model's window), retrieval (the best passages), another
    agent (docs/agents.md) or FILE.py:NAME, and for the bench oracle and chance, which ask no model; several separated by
    commas. By default the agent that the model was trained with."""
    samples: int | None = bounded(None, at_least=1)
    """Documents per length; if not given 128, or all of a file."""
    repeats: int = bounded(1, at_least=1)
    """Readings of each document, each with other random draws; more than 1 needs a temperature above 0."""
    seed: int = bounded(0, 0, 2**63 - 1)
    """Seed of the documents and of all sampling."""
    out: str | None = None
    """Folder of the results; if not given eval/NAME beside the model folder, or ./eval/NAME with --endpoint."""
    allow_files: bool = allow_files_flag()
    resume: Literal["auto", "no"] = "auto"
    """auto: add to the results in the folder; no: refuse a folder with results."""
    label: str | None = None
    """Name of the model in rows and tables, one line of at most 200 characters; the name of its folder if not given."""
    endpoint: str | None = None
    """Address of an OpenAI-compatible server that runs the model, like http://localhost:8000/v1."""
    tokenizer: str | None = None
    """With --endpoint: Hugging Face folder of the served model, for its tokenizer and memrl_agent.yaml."""
