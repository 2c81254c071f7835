"""Measure a model by document length: tasks x lengths x methods.

    python eval.py --model runs/tiny/model --lengths 1,4,16,64
    python eval.py --model DIR --task ruler --lengths 8k,32k --methods memory,one_shot,retrieval --out results/mine
    torchrun --nproc_per_node 8 eval.py --model DIR --task my_questions.jsonl --out results/mine

The same command again continues where it was stopped and runs again what failed; more lengths, samples, repeats,
tasks or methods add to it.
"""

import sys
from dataclasses import dataclass, fields
from typing import Literal

from memrl.reading.open_model import ReaderOptions
from memrl.utils.command_line import Parser, user_errors


@dataclass
class EvalOptions:
    """What is measured."""

    model: str
    """Hugging Face folder of the model; with an endpoint its name there."""
    task: str = "needle"
    """needle, ruler (or any of its 13 tasks), ruler_hotpotqa, or the path of a .jsonl or .parquet file; several with commas."""
    lengths: str | None = None
    """Like 1,4,16 or 8k,1m, for every task given: needle counts chunks (1,4,16 if not given), RULER's tasks tokens (8k,16k,32k),
    ruler_hotpotqa documents (50,100,200). Files are read as they are."""
    methods: str = "memory"
    """memory (chunk by chunk), one_shot (the document in the model's window), retrieval (its best passages)."""
    samples: int | None = None
    """Documents per length; 128 if not given, and all of a file."""
    repeats: int = 1
    """Readings of each document, with other draws each; more than 1 needs a temperature above 0."""
    seed: int = 0
    """Which documents, and all randomness of sampling."""
    out: str | None = None
    """Folder of the results; if not given, eval/NAME beside the model folder, or ./eval/NAME with an endpoint."""
    resume: Literal["auto", "no"] = "auto"
    """auto adds to what the folder holds; no refuses a folder with results."""
    label: str | None = None
    """What the model is called in rows and tables; the name of its folder if not given."""
    endpoint: str | None = None
    """Address of an OpenAI-compatible server that runs the model, like http://localhost:8000/v1."""
    tokenizer: str | None = None
    """With an endpoint: the Hugging Face folder of the served model, of which the tokenizer and memrl_agent.yaml are read."""


def parse(arguments: list[str] | None) -> list:
    """EvalOptions, ReaderOptions, MethodOptions and RulerFiles."""
    from memrl.data.ruler import RulerFiles
    from memrl.evaluation.methods import MethodOptions

    kinds = (EvalOptions, ReaderOptions, MethodOptions, RulerFiles)
    parser = Parser(
        prog="eval.py",
        usage="eval.py --model DIR [--task NAME[,NAME]] [--lengths 8k,32k] [--methods NAME[,NAME]] [--samples N] [--out DIR] ...",
        description="Measure a model by document length: a table with 95% intervals, samples.jsonl, summary.json and "
        "accuracy.png. The same command again continues where it was stopped: finished readings are kept, and those under way, "
        "up to max_rows, begin again. With fewer readings than max_rows none is finished until shortly before the end.",
    )
    parser.add_argument("--config", action="config", help="a YAML file with any of the settings below")
    for kind in kinds:
        parser.add_class_arguments(kind)
    settings = parser.instantiate(parser.parse_args(arguments)).as_dict()
    return [kind(**{f.name: settings[f.name] for f in fields(kind)}) for kind in kinds]


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, 1 where the endpoint or a rank went away or rows are missing, 130 after Ctrl-C, 2 for mistakes."""
    options = parse(arguments)
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


if __name__ == "__main__":
    sys.exit(main())
