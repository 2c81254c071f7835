"""`memrl eval`: measure a model by document length, tasks x lengths x methods.

    memrl eval --model runs/tiny/model --lengths 1,4,16,64
    memrl eval --model DIR --task ruler --lengths 8k,32k --methods memory,one_shot,retrieval --out results/mine
    torchrun --nproc_per_node 8 eval.py --model DIR --task my_questions.jsonl --out results/mine

A reading that fails counts as wrong; if all of them fail, the exit code is 1.
The same command again continues where it was stopped and repeats failed readings. More lengths, samples, repeats, tasks or
methods are added to the results.
"""

import sys
from collections.abc import Sequence

from memrl.evaluation.options import Options
from memrl.reading.open_model import ReaderOptions
from memrl.utils.command_line import parse_options, user_errors


def main(arguments: Sequence[str] | None = None, prog: str = "memrl eval") -> int:
    """The exit code: 0; 1 if every reading failed, rows are missing, or the endpoint or a rank was lost; 130 after Ctrl-C; 2 for
    mistakes.
    """
    from memrl.data.ruler import RulerFiles
    from memrl.evaluation.methods import MethodOptions

    options = parse_options(
        (Options, ReaderOptions, MethodOptions, RulerFiles),
        arguments,
        prog=prog,
        usage="--model DIR [--task NAME[,NAME]] [--lengths 8k,32k] [--methods NAME[,NAME]] [--samples N] [--out DIR] ...",
        description="Measure a model by document length: a table with 95% intervals, samples.jsonl, summary.json and "
        "accuracy.png. The exit code is 1 if every reading failed. The same command again continues where it was stopped: "
        "finished readings are kept, and unfinished ones, at most max_rows of them, start again. "
        "With fewer readings than max_rows none is finished until shortly before the end.",
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
