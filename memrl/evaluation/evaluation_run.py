"""One evaluation: resume a results folder, run the missing readings, print and save the summary."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memrl.evaluation.eval_ranks import Ranks
from memrl.evaluation.eval_settings import fingerprint
from memrl.evaluation.methods import Method, MethodOptions, make_methods
from memrl.evaluation.model_under_test import ModelUnderTest, Options, read_model_settings
from memrl.evaluation.results import PICTURE_FILE, SUMMARY_FILE, RankResults, Results
from memrl.evaluation.runner import Key, Row, all_keys, read_all, share_of
from memrl.evaluation.summary import print_table, summarize
from memrl.evaluation.tasks import Task, choose_lengths, length_units, make_tasks, parse_lengths
from memrl.reading.open_model import ReaderOptions, model_window
from memrl.utils.devices import peak_gib
from memrl.utils.files import write_whole
from memrl.utils.plain_text import printable
from memrl.utils.progress import Progress, format_seconds

if TYPE_CHECKING:
    from memrl.data.ruler import RulerFiles
    from memrl.llm import LLM

MOST_LINES = 6  # more lines in one picture are unreadable


class IncompleteError(RuntimeError):
    """Rows of other ranks are missing, or no row is an answer."""


@dataclass
class Evaluation:
    """An evaluation whose options have been checked.

    Attributes:
        keys: all readings that the command requests.
        left: those that were missing or had failed at the start, over all ranks.
        results: None on ranks above 0.
        llm: None if no reading is left.
    """

    model: ModelUnderTest
    seed: int
    tasks: dict[str, Task]
    methods: dict[str, Method]
    keys: list[Key]
    left: list[Key]
    folder: Path
    ranks: Ranks
    results: Results | None
    llm: LLM | None

    def run(self) -> None:
        """Run the missing readings; then rank 0 prints the table and writes summary.json and accuracy.png.

        Raises:
            IncompleteError: rows are missing, or every reading that the command requests has failed.
        """
        began = time.monotonic()
        with self.results or nullcontext():
            if self.llm is not None:
                self._read(self.llm)
                self.ranks.wait()
            if self.results is not None:
                self.results.collect()
        self.ranks.close()
        if self.results is not None:
            self._report(self.results.rows, time.monotonic() - began)

    def kept(self) -> str:
        """After an interruption: which readings are finished, and which will start again."""
        if self.results is None:
            return "the same command continues"
        done = len(self.results.finished.intersection(self.keys))
        others = " (and those that other ranks finished)" if self.ranks.world > 1 else ""
        return (
            f"{done} of {len(self.keys)} readings are finished{others}; the same command continues. Unfinished readings, up to "
            "--max_rows, start again: a smaller one loses less"
        )

    def _read(self, llm: LLM) -> None:
        mine = share_of(self.left, self.tasks, self.ranks.rank, self.ranks.world)
        turns = sum(self.methods[key.method].num_turns(self.tasks[key.task].num_tokens(key.length)) for key in mine)
        # Only rank 0 shows its progress.
        at_once = max(1, min(len(mine), llm.concurrency))
        progress = Progress("eval", turns, "turns", at_once=at_once, stream=io.StringIO() if self.ranks.rank else None)
        counts: Counter[str] = Counter()
        target = RankResults(self.folder, self.ranks.rank) if self.results is None else nullcontext(self.results)
        with target as rows, progress:
            if not self.ranks.rank:
                for line in llm.about:
                    progress.log(line)
                for name, method in self.methods.items():
                    if method.agent.prompts != self.model.agent.prompts:
                        progress.log(f"{name}: with prompts of memrl/prompts/{name}.yaml, as the model's have no texts for it")
                left, total = len(self.left), len(self.keys)
                failed = 0 if self.results is None else len(self.results.rows.keys() & set(self.left))
                if left < total or failed:
                    again = f"; {failed} that failed run again" if failed else ""
                    progress.log(f"{total - left} of {total} readings are finished already{again}")
                if self.ranks.world > 1:
                    progress.log(f"{self.ranks.world} ranks share {left} readings; the progress below is that of rank 0")

            def on_result(row: Row) -> None:
                rows.add(row)
                counts.update(done=1, right=int(row["strict"]), failed=int(row["error"] is not None))
                fields = {"readings": f"{counts['done']}/{len(mine)}", "strict": f"{counts['right'] / counts['done']:.3f}"}
                if counts["failed"]:
                    fields["failed"] = str(counts["failed"])
                progress.set(progress.completed, **fields)

            read_all(
                llm,
                mine,
                self.tasks,
                self.methods,
                self.seed,
                columns={"model": self.model.label, "chunk_tokens": self.model.agent.chunk_tokens},
                on_result=on_result,
                on_turn=lambda kind: progress.advance(),
            )
            progress.total = progress.completed  # a file's total was an estimate

    def _report(self, rows: dict[Key, Row], seconds: float) -> None:
        if missing := [key for key in self.keys if key not in rows]:
            raise IncompleteError(
                f"{len(missing)} of {len(self.keys)} readings are missing, {astuple(missing[0])} first; is {self.folder} on a "
                "disk that all machines share?"
            )
        # The summary covers the whole folder, rows of earlier commands included.
        summary = [{"model": self.model.label, **entry} for entry in summarize(rows.values(), costs=True)]
        write_whole(self.folder / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
        if self.left:
            _print_totals([rows[key] for key in self.left], seconds)
        # Units of earlier commands' tasks included.
        known = length_units()
        units = {e["task"]: known.get(e["task"], "") if isinstance(e["length"], int) else "" for e in summary}
        print_table(summary, units)
        _print_problems([rows[key] for key in self.keys])
        self._plot(summary, units)
        print(f"results: {self.folder}")
        if all(rows[key]["error"] is not None for key in self.keys):
            raise IncompleteError(f"all {len(self.keys)} readings failed, so the scores say nothing about the model")

    def _plot(self, summary: list[dict[str, Any]], units: dict[str, str]) -> None:
        path = self.folder / PICTURE_FILE
        num_methods = len({entry["method"] for entry in summary})
        series: dict[str, list] = {}
        for entry in summary:
            if units[entry["task"]]:
                name = entry["task"] if num_methods == 1 else f"{entry['task']}, {entry['method']}"
                series.setdefault(name, []).append(entry)
        named = sorted({unit for unit in units.values() if unit})
        if len(named) != 1 or len(series) > MOST_LINES:
            path.unlink(missing_ok=True)  # an earlier command's picture does not show all rows
            if series:
                why = f"lengths in {' and '.join(named)}" if len(named) > 1 else f"{len(series)} lines"
                print(f"no {path.name} for {why}; draw them with memrl report {self.folder} --out DIR")
            return
        from memrl.evaluation.accuracy_plot import plot_accuracy

        plot_accuracy(path, series, unit=named[0], title=f"{self.model.label}: accuracy by document length")


def open_evaluation(
    options: Options, reader: ReaderOptions, method_options: MethodOptions, files: RulerFiles, ranks: Ranks | None = None
) -> Evaluation:
    """Check everything, open the results folder, and load the model if any reading is left. Collective over ranks.

    Raises:
        ValueError: any mistake in the options, the model folder or the results folder.
    """
    ranks = ranks or Ranks.of_environment()
    lengths = None if options.lengths is None else parse_lengths(options.lengths)
    if options.endpoint is None:
        reader = replace(reader, device=ranks.device(reader.device))
    named = [name.strip() for name in (options.methods or "").split(",") if ":" in name]
    if named and reader.agent.function is None:  # a user's file that the command names may be run
        reader = replace(reader, agent=replace(reader.agent, function=named[0]))
    model = read_model_settings(options, reader)
    window = None if options.endpoint is not None else model_window(options.model, reader)
    chosen_methods = model.agent.function if options.methods is None else options.methods
    methods = make_methods(chosen_methods.split(","), method_options, model.agent, window)
    names = [name.strip() for name in options.task.split(",")]
    tasks = {task.name: task for task in make_tasks(names, model.tokenizer, model.agent, files, options.allow_files)}
    chosen = choose_lengths(list(tasks.values()), lengths)
    keys = all_keys(list(tasks.values()), chosen, options.samples, list(methods), options.repeats)
    folder = Path(options.out) if options.out else model.default_folder()
    opened: list[Results] = []

    def open_results() -> list[Key]:
        settings = fingerprint(model, options.seed, tasks, methods)
        opened.append(Results(folder, settings, resume=options.resume == "auto"))
        left = [key for key in keys if key not in opened[0].finished]
        _check_documents(tasks, left, options.seed)
        return left

    try:
        left = ranks.from_rank_0(open_results)
        llm = model.open_llm(methods.values(), tasks.values()) if left else None
    except BaseException:
        for results in opened:
            results.close()
        raise
    results = opened[0] if opened else None
    return Evaluation(model, options.seed, tasks, methods, keys, left, folder, ranks, results, llm)


def _check_documents(tasks: dict[str, Task], left: Sequence[Key], seed: int) -> None:
    # Printed only after two seconds: an error that is found at once then takes one line.
    notice = threading.Timer(2.0, print, ("making a first document of each task",), {"file": sys.stderr})
    notice.start()
    try:
        for task in tasks.values():
            lengths = sorted({key.length for key in left if key.task == task.name}, key=str)
            if lengths:
                task.check(lengths, seed)
    finally:
        notice.cancel()


def _print_totals(rows: list[Row], seconds: float) -> None:
    chunks, prompts, responses = (sum(row[name] for row in rows) for name in ("chunks", "prompt_tokens", "response_tokens"))
    peaks = [row["peak_gib"] for row in rows if row["peak_gib"] is not None]
    memory = f"; peak memory {max(*peaks, peak_gib() or 0):.2f} GiB" if peaks else ""
    tokens = f"{prompts:,} prompt and {responses:,} response tokens"
    print(f"{len(rows)} readings, {chunks:,} chunks in {format_seconds(seconds)}; {tokens}{memory}")


def _print_problems(rows: list[Row], limit: int = 5) -> None:
    """Failures, empty answers (the first few by name) and documents that were cut."""
    failed = [row for row in rows if row["error"] is not None]
    empty = [row for row in rows if row["error"] is None and not row["answer"]]
    for name, found in (("failed", failed), ("empty answer", empty)):
        for row in found[:limit]:
            reason = f": {row['error']}" if row["error"] else ""
            line = f"{name}: {row['task']}, length {row['length']}, {row['method']}, sample {printable(row['id'], 80)}{reason}"
            print(printable(line, 1000))
        if len(found) > limit:
            print(f"... and {len(found) - limit} more; samples.jsonl has them all")
    if failed:
        print(f"{len(failed)} failed: they count as wrong, and the same command runs them again")
    if empty:
        print(f"{len(empty)} answers are empty: they count as wrong")
    if cut := [row["length"] for row in rows if row["method"] == "one_shot" and row["cut_tokens"]]:
        least = min(cut, key=lambda length: (isinstance(length, str), length))  # a file's length is the word "file"
        print(
            f"one_shot: the middle of {len(cut)} documents was cut out, from length {least} on; the window also holds "
            "agent.answer_tokens for the answer"
        )
