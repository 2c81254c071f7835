"""What `eval.py` does once its arguments are parsed: take up a folder, read what is missing from it, tell what it shows."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memrl.evaluation.eval_ranks import Ranks
from memrl.evaluation.eval_settings import fingerprint
from memrl.evaluation.measure import peak_gib
from memrl.evaluation.results import RankResults, Results
from memrl.evaluation.runner import Key, Row, all_keys, read_all, share_of
from memrl.evaluation.summary import print_table, summarize, summarize_costs, write_summary
from memrl.evaluation.target import Options, Target, check_options, open_target
from memrl.evaluation.tasks import Task, choose_lengths, length_units, make_tasks, parse_lengths
from memrl.reading.open_model import ReaderOptions, decoding
from memrl.utils.progress import Progress, format_seconds

if TYPE_CHECKING:
    from memrl.data.ruler import RulerFiles
    from memrl.evaluation.methods import Method, MethodOptions
    from memrl.llm import LocalLLM

MOST_LINES = 6  # of a picture that can be read


class IncompleteError(RuntimeError):
    """Rows of other ranks are not where they should be."""


@dataclass
class Evaluation:
    """An evaluation whose set-up has been checked.

    Attributes:
        keys: all readings that the command asks for.
        left: those of them that were missing or had failed when it began, over all ranks.
        results: on rank 0 alone.
        llm: None where nothing is left.
    """

    options: Options
    target: Target
    tasks: dict[str, Task]
    methods: dict[str, Method]
    keys: list[Key]
    left: list[Key]
    folder: Path
    ranks: Ranks
    results: Results | None
    llm: LocalLLM | None

    def run(self) -> None:
        """Read what is missing; then rank 0 prints the table and writes summary.json and accuracy.png."""
        began = time.monotonic()
        with self.results or nullcontext():
            if self.llm is not None:
                self._read()
                self.ranks.wait()
            if self.results is not None:
                self.results.collect()
        self.ranks.close()
        if self.results is not None:
            self._tell(time.monotonic() - began)

    def kept(self) -> str:
        """For who interrupts it: what is finished, and what will be read again."""
        if self.results is None:
            return "the same command continues"
        finished = self.results.finished
        done = sum(key in finished for key in self.keys)
        others = " (and what other ranks finished)" if self.ranks.world > 1 else ""
        return (
            f"{done} of {len(self.keys)} readings are finished{others}; the same command continues. Readings under way, up "
            "to --max_rows, begin again: a smaller one loses less"
        )

    def _read(self) -> None:
        mine = share_of(self.left, self.tasks, self.ranks.rank, self.ranks.world)
        turns = [self.methods[key.method].num_turns(self.tasks[key.task].num_tokens(key.length)) for key in mine]
        target = RankResults(self.folder, self.ranks.rank) if self.results is None else nullcontext(self.results)
        with target as rows, _progress(self.ranks, sum(turns)) as progress:
            self._announce(progress)
            counts = {"done": 0, "right": 0.0, "failed": 0}

            def on_result(row: Row) -> None:
                rows.add(row)
                counts["done"] += 1
                counts["right"] += row["strict"]
                counts["failed"] += row["error"] is not None
                fields = {"readings": f"{counts['done']}/{len(mine)}", "strict": f"{counts['right'] / counts['done']:.3f}"}
                if counts["failed"]:
                    fields["failed"] = str(counts["failed"])
                progress.set(progress.completed, **fields)

            read_all(
                self.llm,
                mine,
                self.tasks,
                self.methods,
                self.options.seed,
                columns={"model": self.target.label, "chunk_tokens": self.target.agent.chunk_tokens},
                on_result=on_result,
                on_turn=lambda kind: progress.advance(),
            )
            progress.total = progress.completed  # a file's total was an estimate

    def _announce(self, progress: Progress) -> None:
        if self.ranks.rank:
            return
        for line in self.llm.about:
            progress.log(line)
        if len(self.left) < len(self.keys):
            progress.log(f"{len(self.keys) - len(self.left)} of {len(self.keys)} readings are there already")
        if self.ranks.world > 1:
            progress.log(f"{self.ranks.world} ranks share {len(self.left)} readings; what follows is rank 0's part")

    def _tell(self, seconds: float) -> None:
        if missing := [key for key in self.keys if key not in self.results.rows]:
            raise IncompleteError(
                f"{len(missing)} of {len(self.keys)} readings are missing, {tuple(missing[0])} first; is {self.folder} on a disk "
                "that all machines share?"
            )
        rows = list(self.results.rows.values())  # those of earlier commands too: the files of a folder tell of all of it
        summary = [entry | cost for entry, cost in zip(summarize(rows), summarize_costs(rows), strict=True)]
        summary = [{"model": self.target.label, **entry} for entry in summary]
        write_summary(summary, self.folder / "summary.json")
        if self.left:
            print(_pace([self.results.rows[key] for key in self.left], seconds))
        units = _units(summary)
        print_table(summary, units)
        asked = [self.results.rows[key] for key in self.keys]
        _print_wrong(asked)
        _print_cut(asked)
        self._plot(summary, units)
        print(f"results: {self.folder}")

    def _plot(self, summary: list[dict[str, Any]], units: dict[str, str]) -> None:
        path = self.folder / "accuracy.png"
        num_methods = len({entry["method"] for entry in summary})
        series: dict[str, list] = {}
        for entry in summary:
            if units[entry["task"]]:
                name = entry["task"] if num_methods == 1 else f"{entry['task']}, {entry['method']}"
                series.setdefault(name, []).append(entry)
        named = sorted({unit for unit in units.values() if unit})
        if len(named) != 1 or len(series) > MOST_LINES:
            path.unlink(missing_ok=True)  # an earlier command's, which shows a part alone
            if series:
                why = f"lengths in {' and '.join(named)}" if len(named) > 1 else f"{len(series)} lines"
                print(f"no {path.name} for {why}; draw them with memrl report {self.folder} --out DIR")
            return
        from memrl.evaluation.accuracy_plot import plot_accuracy

        plot_accuracy(path, series, unit=named[0], title=f"{self.target.label}: accuracy by document length")


def open_evaluation(
    options: Options, reader: ReaderOptions, method_options: MethodOptions, files: RulerFiles, ranks: Ranks | None = None
) -> Evaluation:
    """Check everything, take up the results folder, and load the model if anything is left to do. Collective over ranks.

    Raises:
        ValueError: any mistake in the options, the model folder or the results folder.
    """
    ranks = ranks or Ranks.of_environment()
    check_options(options, reader)
    lengths = None if options.lengths is None else parse_lengths(options.lengths)
    target = open_target(options, reader, ranks)
    methods = {method.name: method for method in target.make_methods(options.methods.split(","), method_options)}
    names = [name.strip() for name in options.task.split(",")]
    tasks = {task.name: task for task in make_tasks(names, target.tokenizer, target.agent, files)}
    chosen = choose_lengths(list(tasks.values()), lengths)
    keys = all_keys(list(tasks.values()), chosen, options.samples, list(methods), options.repeats)
    folder = Path(options.out) if options.out else target.default_folder()
    opened: list[Results] = []

    def take_up() -> list[Key]:
        settings = fingerprint(
            model=target.label,
            source=target.source(),
            tokenizer=target.tokenizer_folder,
            decoding=decoding(reader),
            seed=options.seed,
            tasks=list(tasks.values()),
            methods=list(methods.values()),
        )
        opened.append(Results(folder, settings, resume=options.resume == "auto"))
        left = [key for key in keys if key not in opened[0].finished]
        _check_documents(tasks, left, options.seed)
        return left

    try:
        left = ranks.from_rank_0(take_up)
        llm = target.open_llm(list(methods.values()), tasks.values()) if left else None
    except BaseException:
        for results in opened:
            results.close()
        raise
    results = opened[0] if opened else None
    return Evaluation(options, target, tasks, methods, keys, left, folder, ranks, results, llm)


def _units(summary: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What each task's lengths count, those of earlier commands included; "" for files."""
    known = length_units()
    return {entry["task"]: known.get(entry["task"], "") if isinstance(entry["length"], int) else "" for entry in summary}


def _check_documents(tasks: dict[str, Task], left: Sequence[Key], seed: int) -> None:
    # Said only where it takes a while: a mistake that is found at once is told in one line.
    notice = threading.Timer(2.0, print, ("making a first document of each task",), {"file": sys.stderr})
    notice.start()
    try:
        for task in tasks.values():
            lengths = sorted({key.length for key in left if key.task == task.name}, key=str)
            if lengths:
                task.check(lengths, seed)
    finally:
        notice.cancel()


def _progress(ranks: Ranks, total: int) -> Progress:
    stream = None
    if ranks.rank:
        import io

        stream = io.StringIO()  # one rank talks
    return Progress("eval", total, "turns", stream=stream)


def _pace(rows: list[Row], seconds: float) -> str:
    chunks, prompts, responses = (sum(row[name] for row in rows) for name in ("chunks", "prompt_tokens", "response_tokens"))
    peaks = [row["peak_gib"] for row in rows if row["peak_gib"] is not None]
    parts = [f"{len(rows)} readings, {chunks:,} chunks in {format_seconds(seconds)}"]
    parts.append(f"{prompts:,} prompt and {responses:,} response tokens")
    if peaks:
        parts.append(f"peak memory {max(*peaks, peak_gib() or 0):.2f} GiB")
    return "; ".join(parts)


def _print_wrong(rows: list[Row], limit: int = 5) -> None:
    """Failures and empty answers: how many, and which, the first few by name."""
    failed = [row for row in rows if row["error"] is not None]
    empty = [row for row in rows if row["error"] is None and not row["answer"]]
    for name, found in (("failed", failed), ("empty answer", empty)):
        for row in found[:limit]:
            reason = f": {row['error']}" if row["error"] else ""
            print(f"{name}: {row['task']}, length {row['length']}, {row['method']}, sample {row['id']}{reason}")
        if len(found) > limit:
            print(f"... and {len(found) - limit} more; samples.jsonl has them all")
    if failed:
        print(f"{len(failed)} failed: they count as wrong, and the same command runs them again")
    if empty:
        print(f"{len(empty)} answers are empty: they count as wrong")


def _print_cut(rows: list[Row]) -> None:
    """Where one-shot reading did not see all of the document."""
    cut = [row for row in rows if row["method"] == "one_shot" and row["cut_tokens"]]
    if cut:
        least = min(row["length"] for row in cut)
        print(
            f"one_shot: the middle of {len(cut)} documents was left out, from length {least} on; the window also holds "
            "agent.answer_tokens for the answer"
        )
