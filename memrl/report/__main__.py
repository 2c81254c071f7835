"""Results folders of eval.py as one report: tables in Markdown, three kinds of picture, and all numbers as JSON.

python -m memrl.report results/base results/trained --out report
python -m memrl.report results/a results/b --out report --score strict --baseline "Qwen2.5-7B-Instruct"
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from memrl.scoring.scores import SCORES
from memrl.utils.command_line import fail, user_errors


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see {self.prog} --help)")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m memrl.report",
        description="Tables and pictures of results folders of eval.py: accuracy by length with 95% intervals, "
        "paired comparison, retention of evidence per chunk, score by depth, cost, failures. A folder may still be "
        "being written. Each method of a model is a series; folders with equal settings and other tasks or lengths are joined.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a results folder of eval.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of report.md, report.json and the PNG files")
    parser.add_argument("--score", choices=SCORES, default="lenient", help="what is shown and compared (default: lenient)")
    parser.add_argument(
        "--baseline", metavar="LABEL", help="series that the others are compared with, as named in report.md (default: the first)"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    from memrl.data.ruler import TASKS
    from memrl.evaluation.tasks import length_units
    from memrl.report.report_pages import make_report, write_report
    from memrl.report.series import read_series

    with user_errors():
        series = read_series(options.folders)
        report = make_report(series, options.score, options.baseline, TASKS, length_units())
        names = write_report(report, options.out)
    print(*(options.out / name for name in names), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
