"""`memrl report`, `memrl trace` and `memrl curves`: tables, pictures and web pages of evaluations and training runs."""

from dataclasses import dataclass
from pathlib import Path

from memrl.report.rollout_page import LAST
from memrl.scoring.scores import SCORES
from memrl.utils.bounds import bounded
from memrl.utils.command_line import Command, argument, check_out
from memrl.utils.files import PAGE_MARK, check_own_output
from memrl.utils.pictures import MARK


@dataclass(kw_only=True)
class Report(Command):
    """Make tables and pictures of results folders of `memrl eval`.

    Accuracy by length with 95% intervals, paired comparison, retention of evidence per chunk, score by depth, cost, failures. A
    folder may still be growing. Each method of a model is a series; folders with equal settings and other tasks or lengths are
    joined.
    """

    folders: list[Path] = argument("folders", type=Path, nargs="+", metavar="FOLDER", help="results folder of `memrl eval`")
    out: Path
    """Folder of report.md, report.json and the PNG files."""
    score: str = argument("--score", choices=SCORES, default="lenient", help="score to show and compare")
    baseline: str | None = None
    """Series that the others are compared with, by its name in report.md; the first if not given."""

    def run(self) -> None:
        from memrl.data.ruler import TASKS
        from memrl.evaluation.tasks import length_units
        from memrl.report.report_pages import make_report, write_report
        from memrl.report.series import read_series

        report = make_report(read_series(self.folders), self.score, self.baseline, TASKS, length_units())
        print(*(self.out / name for name in write_report(report, self.out)), sep="\n")


@dataclass(kw_only=True)
class Trace(Command):
    """Show sample rollouts of a training run as a web page: the memory after each chunk and what changed in it."""

    rollouts: Path = argument("rollouts", type=Path, metavar="ROLLOUTS", help="rollouts.jsonl of a run")
    out: Path
    """HTML file to write."""
    step: int | None = bounded(None, at_least=1)
    """Show only the trajectories of this step."""
    last: int = bounded(LAST, at_least=1)
    """Show only this many trajectories, the last ones."""

    def run(self) -> None:
        from memrl.report.trace_page import write_rollouts

        if self.rollouts.is_dir():
            raise ValueError(f"{self.rollouts} is a folder; give {self.rollouts / 'rollouts.jsonl'}")
        check_out(self.out, [self.rollouts])
        check_own_output(self.out, PAGE_MARK)
        count = write_rollouts(self.out, self.rollouts, self.step, self.last)
        print(f"{self.out}: {count} trajector{'y' if count == 1 else 'ies'}")


@dataclass(kw_only=True)
class Curves(Command):
    """Draw the learning curves of training runs as one picture."""

    run_dirs: list[Path] = argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="run folder; several are overlaid")
    out: Path | None = None
    """PNG file to write; RUN_DIR/curves.png if not given, for several runs ./curves.png."""

    def run(self) -> None:
        from memrl.report.curves import draw, read_curves

        names = [folder.resolve().name for folder in self.run_dirs]
        labels = [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, self.run_dirs, strict=True)]
        runs = [read_curves(folder, label) for folder, label in zip(self.run_dirs, labels, strict=True)]
        for run, folder in zip(runs, self.run_dirs, strict=True):
            if not run.series:
                raise ValueError(f"{folder} has no step in metrics.jsonl to show")
        path = self.out or (self.run_dirs[0] if len(runs) == 1 else Path(".")) / "curves.png"
        check_out(path, suffixes=(".png",))
        if path.resolve().parent not in [folder.resolve() for folder in self.run_dirs]:  # a run's own picture is replaced
            check_own_output(path, MARK)
        draw(runs, path)
        print(path)
