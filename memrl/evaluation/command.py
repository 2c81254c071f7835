"""What `eval.py` does once its arguments are parsed."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from memrl.agents.memory import AgentConfig
from memrl.evaluation.results import Results, fingerprint
from memrl.evaluation.runner import Key, Row, evaluate, sample_keys
from memrl.evaluation.summary import print_table, summarize, write_summary
from memrl.evaluation.tasks import Length, Task, make_task, parse_lengths
from memrl.limits import check_cache
from memrl.progress import Progress, format_seconds
from memrl.runtime import ReaderOptions, check_seed, decoding, load_settings, open_llm, peak_memory

if TYPE_CHECKING:
    from memrl.llm import LocalLLM

METHOD = "memory"


class Options(Protocol):
    """The fields of `eval.py`'s options that are used here."""

    model: str
    task: str
    lengths: str | None
    samples: int | None
    seed: int
    out: str | None
    resume: str


@dataclass
class Plan:
    """One task's part of an evaluation."""

    task: Task
    lengths: list[Length]
    keys: list[Key]

    def num_chunks(self) -> int:
        return sum(self.task.num_chunks(n, sum(key[1] == n for key in self.keys)) for n in self.lengths)


@dataclass
class Evaluation:
    """An evaluation whose set-up has been checked; `llm` is None where every row is there already."""

    options: Options
    agent: AgentConfig
    plans: list[Plan]
    results: Results
    llm: LocalLLM | None

    def run(self) -> None:
        """Read what is missing, then print the table and write summary.json and accuracy.png."""
        with self.results:
            if self.llm is not None:
                self._read()
        rows = [self.results.rows[key] for plan in self.plans for key in plan.keys]
        summary = summarize(rows, METHOD)
        write_summary(summary, self.results.folder / "summary.json")
        self._plot(summary)
        print_table(summary, {plan.task.name: plan.task.length_unit for plan in self.plans})
        self._print_failures(rows)
        print(f"results: {self.results.folder}")

    def _read(self) -> None:
        done = self.results.finished
        wanted = {key for plan in self.plans for key in plan.keys}
        old = [self.results.rows[key] for key in wanted & done]
        counts = {"done": len(old), "right": sum(row["strict"] for row in old), "failed": 0}
        total = sum(plan.num_chunks() for plan in self.plans)
        print(*self.llm.about, sep="\n", file=sys.stderr)
        began, chunks_before = time.monotonic(), sum(row["chunks"] for row in old)
        with Progress("eval", total, "chunks", start=chunks_before) as progress:

            def on_result(row: Row) -> None:
                self.results.add(row)
                counts["done"] += 1
                counts["right"] += row["strict"]
                counts["failed"] += row["error"] is not None
                fields = {"documents": f"{counts['done']}/{len(wanted)}"}
                fields["strict"] = f"{counts['right'] / counts['done']:.3f}"
                if counts["failed"]:
                    fields["failed"] = str(counts["failed"])
                progress.set(progress.completed, **fields)

            for plan in self.plans:
                evaluate(
                    self.llm,
                    plan.task,
                    plan.lengths,
                    self.options.samples,
                    self.agent,
                    self.options.seed,
                    done=done,
                    on_result=on_result,
                    on_chunk=progress.advance,
                )
            progress.total = progress.completed  # a file's total was an estimate
        seconds = time.monotonic() - began
        chunks = progress.completed - chunks_before
        pace = f"{chunks} chunks in {format_seconds(seconds)} ({chunks / max(seconds, 1e-9):.1f} chunks/s)"
        print(f"{counts['done'] - len(old)} documents, {pace}, peak memory {peak_memory()}")

    def _plot(self, summary: list[dict]) -> None:
        plotted = [plan.task for plan in self.plans if plan.task.length_unit]
        if not plotted:
            return
        from memrl.evaluation.plot import plot_accuracy

        series = {task.name: [entry for entry in summary if entry["task"] == task.name] for task in plotted}
        title = f"{Path(self.options.model).resolve().name}: accuracy by document length"
        plot_accuracy(self.results.folder / "accuracy.png", series, unit=plotted[0].length_unit, title=title)

    @staticmethod
    def _print_failures(rows: list[Row], limit: int = 5) -> None:
        failed = [row for row in rows if row["error"] is not None]
        for row in failed[:limit]:
            print(f"failed: {row['task']}, length {row['length']}, sample {row['id']}: {row['error']}")
        if len(failed) > limit:
            print(f"... and {len(failed) - limit} more; samples.jsonl has them all")
        if failed:
            print("failures count as wrong; the same command runs them again")


def open_evaluation(options: Options, reader: ReaderOptions) -> Evaluation:
    """Check everything, take up the results folder, and load the model if anything is left to do.

    Raises:
        ValueError: any mistake in the options, the model folder or the results folder.
    """
    names = [name.strip() for name in options.task.split(",")]
    lengths = None if options.lengths is None else parse_lengths(options.lengths)
    if options.samples is not None and options.samples < 1:
        raise ValueError(f"samples is {options.samples}; it must be at least 1")
    check_seed(options.seed)
    agent, tokenizer = load_settings(options.model, reader)
    tasks = [make_task(name, tokenizer, agent) for name in names]
    known = [task.name for task in tasks]
    if len(set(known)) < len(known):
        twice = max(known, key=known.count)
        raise ValueError(f"task names two tasks that are called {twice!r}; run them into two --out folders")
    if lengths is not None and not any(task.length_unit for task in tasks):
        raise ValueError(f"lengths is given, but {options.task} is read as it is; leave --lengths out")
    plans = []
    for task in tasks:
        chosen = list(lengths if lengths and task.length_unit else task.default_lengths)
        if task.max_length is not None and chosen[-1] > task.max_length:
            most = f"{task.max_length} {task.length_unit}"
            raise ValueError(f"lengths holds {chosen[-1]}; a document of {task.name} has at most {most}")
        plans.append(Plan(task, chosen, sample_keys(task, chosen, options.samples)))
    settings = fingerprint(options.model, agent, decoding(reader), reader.dtype, options.seed, tasks, METHOD)
    model = Path(options.model).resolve()
    folder = Path(options.out) if options.out else model.parent / "eval" / model.name
    results = Results(folder, settings, resume=options.resume == "auto")
    complete = results.finished.issuperset(key for plan in plans for key in plan.keys)
    try:
        llm = None if complete else open_llm(options.model, tokenizer, agent, reader)
        if llm is not None:
            # A file's documents may all be short, and tokenising them would take a while; what does not fit
            # fails there, and is run again by a command with a larger cache.
            known_full = any(task.length_unit for task in tasks)
            least = {} if known_full else {"document_tokens": 0, "question_tokens": 0}
            check_cache(llm.sampler, tokenizer, agent, **least)
    except BaseException:
        results.close()
        raise
    return Evaluation(options, agent, plans, results, llm)
