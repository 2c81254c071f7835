"""Measure a memory agent by document length.

    python eval.py --model runs/tiny/model --lengths 1,4,16,64
    python eval.py --model DIR --task my_questions.jsonl --out results/mine

The same command again continues where it was stopped and runs again what failed; more lengths, samples or
tasks add to it.
"""

import sys
from dataclasses import dataclass, fields
from typing import Literal

from memrl.cli import Parser, user_errors
from memrl.runtime import ReaderOptions


@dataclass
class EvalOptions:
    """What is measured."""

    model: str
    """Hugging Face folder of the model."""
    task: str = "needle"
    """needle, or the path of a .jsonl file; several with commas between."""
    lengths: str | None = None
    """Like 1,4,16 or 8k,1m; for needle they count chunks (default 1,4,16). Files are read as they are."""
    samples: int | None = None
    """Documents per length; 128 if not given, and all of a file."""
    seed: int = 0
    """Which documents, and all randomness of sampling."""
    out: str | None = None
    """Folder of the results; `eval` beside the model folder if not given."""
    resume: Literal["auto", "no"] = "auto"
    """auto adds to what the folder holds; no refuses a folder with results."""


def parse(arguments: list[str] | None) -> tuple[EvalOptions, ReaderOptions]:
    parser = Parser(
        prog="eval.py",
        usage="eval.py --model DIR [--task NAME[,NAME]] [--lengths 1,4,16] [--samples N] [--out DIR] [...]",
        description="Measure a memory agent by document length: a table with 95% intervals, samples.jsonl, "
        "summary.json and accuracy.png. The same command again continues where it was stopped.",
    )
    parser.add_argument("--config", action="config", help="a YAML file with any of the settings below")
    parser.add_class_arguments(EvalOptions)
    parser.add_class_arguments(ReaderOptions)
    settings = parser.instantiate(parser.parse_args(arguments)).as_dict()
    split = [{f.name: settings[f.name] for f in fields(kind)} for kind in (EvalOptions, ReaderOptions)]
    return EvalOptions(**split[0]), ReaderOptions(**split[1])


def main(arguments: list[str] | None = None) -> int:
    options, reader = parse(arguments)
    from memrl.evaluation.command import open_evaluation

    try:
        with user_errors():
            evaluation = open_evaluation(options, reader)
        evaluation.run()
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
