"""`memrl eval`: measure a model by document length, tasks x lengths x methods.

    memrl eval --model runs/tiny/model --lengths 1,4,16,64
    memrl eval --model DIR --task ruler --lengths 8k,32k --methods memory,one_shot,retrieval --out results/mine
    torchrun --nproc_per_node 8 eval.py --model DIR --task my_questions.jsonl --out results/mine

The same command again continues where it was stopped and repeats failed readings. More lengths, samples, repeats, tasks or
methods are added to the results.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memrl.reading.open_model import ReaderOptions
from memrl.utils.bounds import bounded
from memrl.utils.command_line import parse_options, user_errors


@dataclass
class EvalOptions:
    """What to measure."""

    model: str
    """Hugging Face folder of the model; with --endpoint the model's name on the server."""
    task: str = "needle"
    """needle, ruler (all of its 13 tasks, or one by name), ruler_hotpotqa, or the path of a .jsonl or .parquet file; several
    separated by commas."""
    lengths: str | None = None
    """Document lengths such as 1,4,16 or 8k,1m: chunks for needle (1,4,16 if not given), tokens for RULER's tasks (8k,16k,32k),
    documents for ruler_hotpotqa (50,100,200). Documents of files keep their length."""
    methods: str = "memory"
    """memory (reads chunk by chunk), one_shot (the whole document in the model's window), retrieval (the best passages); several
    separated by commas."""
    samples: int | None = bounded(None, at_least=1)
    """Documents per length; if not given 128, or all of a file."""
    repeats: int = bounded(1, at_least=1)
    """Readings of each document, each with other random draws; more than 1 needs a temperature above 0."""
    seed: int = bounded(0, 0, 2**63 - 1)
    """Seed of the documents and of all sampling."""
    out: str | None = None
    """Folder of the results; if not given eval/NAME beside the model folder, or ./eval/NAME with --endpoint."""
    resume: Literal["auto", "no"] = "auto"
    """auto: add to the results in the folder; no: refuse a folder with results."""
    label: str | None = None
    """Name of the model in rows and tables; the name of its folder if not given."""
    endpoint: str | None = None
    """Address of an OpenAI-compatible server that runs the model, like http://localhost:8000/v1."""
    tokenizer: str | None = None
    """With --endpoint: Hugging Face folder of the served model, for its tokenizer and memrl_agent.yaml."""


def main(arguments: Sequence[str] | None = None, prog: str = "memrl eval") -> int:
    """The exit code: 0, 1 if the endpoint or a rank was lost or rows are missing, 130 after Ctrl-C, 2 for mistakes."""
    from memrl.data.ruler import RulerFiles
    from memrl.evaluation.methods import MethodOptions

    options = parse_options(
        (EvalOptions, ReaderOptions, MethodOptions, RulerFiles),
        arguments,
        prog=prog,
        usage="--model DIR [--task NAME[,NAME]] [--lengths 8k,32k] [--methods NAME[,NAME]] [--samples N] [--out DIR] ...",
        description="Measure a model by document length: a table with 95% intervals, samples.jsonl, summary.json and "
        "accuracy.png. The same command again continues where it was stopped: finished readings are kept, and unfinished ones, "
        "at most max_rows of them, start again. With fewer readings than max_rows none is finished until shortly before the end.",
        config=True,
    )
    from memrl.evaluation.evaluation_run import IncompleteError, open_evaluation

    evaluation = None
    with user_errors():
        try:
            evaluation = open_evaluation(*options)
            evaluation.run()
        except KeyboardInterrupt:
            kept = "the same command continues" if evaluation is None else evaluation.kept()
            print(f"interrupted; {kept}", file=sys.stderr)
            return 130
        except (ConnectionError, IncompleteError) as error:  # a ConnectionError is an OSError, but no mistake
            print(f"error: {error}; the same command continues", file=sys.stderr)
            return 1
    return 0
