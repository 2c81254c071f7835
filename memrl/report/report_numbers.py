"""Compute the report's numbers from rows: scores by task and length, averages, paired comparisons, costs, retention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from memrl.evaluation.accuracy_plot import Estimate
from memrl.evaluation.statistics import Difference, bootstrap_means, paired_bootstrap, paired_interval, score_interval
from memrl.evaluation.tasks import Length
from memrl.report.depth_map import DepthMap, depth_map
from memrl.report.retention import RetentionAtEnd, RetentionPoint, is_traced, retention_at_end, retention_curve
from memrl.report.series import Cell, Row, Series, sample_scores, sort_lengths


@dataclass(frozen=True)
class Score(Estimate):
    """A mean score with its 95% interval, and the number of samples behind it.

    Attributes:
        n: samples.
        readings: of these samples; more than n where samples were read several times.
        failures: readings that ended in an error; they count as wrong.
        empty: readings with an empty answer; they count as wrong too.
    """

    n: int
    readings: int
    failures: int
    empty: int


@dataclass(frozen=True)
class Cost:
    """Means per reading, and the highest peak of memory; None if unrecorded."""

    readings: int
    seconds: float | None
    prompt_tokens: float | None
    response_tokens: float | None
    peak_gib: float | None


@dataclass
class TaskNumbers:
    """The numbers of one task; every mapping is by series label and length.

    Attributes:
        baseline: the series that the others are compared with: the report's baseline if it has the task.
        curves, at_end: the gold answers in memory after the evidence and at the end.
        answered: mean scores of the readings of `at_end`.
        untraced: readings left out of `curves` and `at_end`, see `is_traced`.
    """

    name: str
    unit: str
    baseline: Series
    scores: dict[str, dict[Length, Score]] = field(default_factory=dict)
    differences: dict[str, dict[Length, Difference | None]] = field(default_factory=dict)
    costs: dict[str, dict[Length, Cost]] = field(default_factory=dict)
    curves: dict[str, dict[Length, list[RetentionPoint]]] = field(default_factory=dict)
    at_end: dict[str, dict[Length, RetentionAtEnd]] = field(default_factory=dict)
    answered: dict[str, dict[Length, float]] = field(default_factory=dict)
    untraced: dict[str, int] = field(default_factory=dict)
    depths: dict[str, DepthMap] = field(default_factory=dict)

    def left_out(self) -> str:
        """What the picture of retention leaves out, in words; empty where it shows all readings."""
        count = sum(self.untraced.values())
        if not count:
            return ""
        readings = sum(score.readings for label in self.at_end for score in self.scores[label].values())
        return f"left out: {count:,} of {readings:,} readings,\nwhose gold answers (yes, no) cannot be searched for"


@dataclass
class Report:
    """The numbers of a report.

    Attributes:
        averaged: names of the tasks in `average`; empty where there is no average.
        average_unit: what the lengths of `average` count.
    """

    series: list[Series]
    baseline: Series
    score: str
    tasks: list[TaskNumbers]
    averaged: list[str]
    average: dict[str, dict[Length, Score]]
    average_unit: str


def make_report(
    series: Sequence[Series], score: str, baseline: str | None, ruler: Sequence[str], units: Mapping[str, str]
) -> Report:
    """All numbers of a report.

    Args:
        baseline: label of the series that the others are compared with; None is the first. For a task that it lacks, the first
            series with that task is used.
        ruler: names of the tasks that are averaged, as far as there are rows of them.
        units: what a task's lengths count, by name.

    Raises:
        ValueError: no series has that label.
    """
    labels = [one.label for one in series]
    if baseline is not None and baseline not in labels:
        known = ", ".join(repr(label) for label in labels)
        raise ValueError(f"baseline is {baseline!r}, and the series are {known}; give one of them")
    base = series[labels.index(baseline) if baseline is not None else 0]
    names = sorted({task for one in series for task, _ in one.rows})
    averaged = [task for task in ruler if task in names]
    average = {one.label: average_of(one, averaged, score) for one in series} if len(averaged) > 1 else {}
    average = {label: line for label, line in average.items() if line}
    unit = units.get(averaged[0], "") if average else ""
    tasks = [TaskNumbers(name, units.get(name, ""), _baseline(name, series, base)) for name in names]
    for task in tasks:
        _fill_in(task, series, score)
    return Report(list(series), base, score, tasks, averaged if average else [], average, unit)


def _baseline(task: str, series: Sequence[Series], chosen: Series) -> Series:
    return next(one for one in (chosen, *series) if any(name == task for name, _ in one.rows))


def _fill_in(task: TaskNumbers, series: Sequence[Series], score: str) -> None:
    for one in series:
        rows = {length: readings for (name, length), readings in one.rows.items() if name == task.name}
        if not rows:
            continue
        label = one.label
        task.scores[label] = {length: score_of(readings, score) for length, readings in rows.items()}
        task.costs[label] = {length: cost_of(readings) for length, readings in rows.items()}
        if one is not task.baseline:
            task.differences[label] = {length: compare(one, task.baseline, (task.name, length), score) for length in rows}
        traced = {length: [row for row in readings if is_traced(row)] for length, readings in rows.items()}
        at_end = {length: end for length, readings in traced.items() if (end := retention_at_end(readings)) is not None}
        if at_end:
            task.at_end[label] = at_end
            task.answered[label] = {length: score_of(traced[length], score).mean for length in at_end}
            task.untraced[label] = sum(len(rows[length]) - len(traced[length]) for length in rows)
            task.curves[label] = {length: points for length in at_end if (points := retention_curve(traced[length]))}
        if (depths := depth_map(rows, score)) is not None:
            task.depths[label] = depths


def score_of(rows: Sequence[Row], score: str) -> Score:
    """The score of one task and length."""
    values = list(sample_scores(rows, score).values())
    return Score(math.fsum(values) / len(values), *score_interval(values), len(values), len(rows), *_without_answer(rows))


def average_of(series: Series, tasks: Sequence[str], score: str) -> dict[Length, Score]:
    """The mean over tasks, each with the same weight, at every length at which the series has all of them.

    The interval is the bootstrap's over samples within tasks: the tasks themselves are fixed, not drawn. Where every value
    is 0, or every value is 1, it is Wilson's over all samples.
    """
    lengths = sort_lengths(length for task, length in series.rows if task in tasks)
    result = {}
    for length in lengths:
        if any((task, length) not in series.rows for task in tasks):
            continue
        groups = [series.rows[task, length] for task in tasks]
        values = [list(sample_scores(rows, score).values()) for rows in groups]
        pooled = [value for group in values for value in group]
        mean = math.fsum(math.fsum(group) / len(group) for group in values) / len(values)
        if set(pooled) in ({0.0}, {1.0}):
            low, high = score_interval(pooled)
        else:
            # A different seed for each task: equal seeds would correlate the tasks' draws.
            draws = np.sum([bootstrap_means(group, seed=seed) for seed, group in enumerate(values)], axis=0) / len(values)
            low, high = (float(bound) for bound in np.quantile(draws, [0.025, 0.975]))
        rows = [row for group in groups for row in group]
        result[length] = Score(mean, low, high, len(pooled), len(rows), *_without_answer(rows))
    return result


def compare(series: Series, base: Series, cell: Cell, score: str) -> Difference | None:
    """`series` minus `base` on their common samples of a task and length; None if there are none.

    Samples are the same if index, question and gold answers are equal. A document that could not be made has no question; the
    index alone identifies it, so that the failure counts as wrong here too. The p-value is the sign-flip test's. The interval
    is Agresti and Min's where all scores are 0 or 1, else the bootstrap's.
    """
    rows, base_rows = series.rows.get(cell, ()), base.rows.get(cell, ())
    scores, base_scores = sample_scores(rows, score), sample_scores(base_rows, score)
    texts, base_texts = _texts(rows), _texts(base_rows)
    common = [
        index
        for index in scores
        if index in base_scores and (not texts[index] or not base_texts[index] or texts[index] == base_texts[index])
    ]
    if not common:
        return None
    a, b = [scores[index] for index in common], [base_scores[index] for index in common]
    result = paired_bootstrap(a, b)
    if {*a, *b} <= {0.0, 1.0}:
        gains, losses = sum(x > y for x, y in zip(a, b, strict=True)), sum(x < y for x, y in zip(a, b, strict=True))
        low, high = paired_interval(gains, losses, len(common))
        return Difference(result.mean, low, high, result.p_value, result.n)
    return result


def cost_of(rows: Sequence[Row]) -> Cost:
    def recorded(name: str) -> list[float]:
        return [float(row[name]) for row in rows if row[name] is not None]

    def mean(name: str) -> float | None:
        values = recorded(name)
        return math.fsum(values) / len(values) if values else None

    peak = max(recorded("peak_gib"), default=None)
    return Cost(len(rows), mean("seconds"), mean("prompt_tokens"), mean("response_tokens"), peak)


def has_other_version(one: Series, base: Series, task: str) -> bool:
    """Whether a task's version differs from the baseline's: equal questions may then have different documents."""
    return task in one.versions and task in base.versions and one.versions[task] != base.versions[task]


def _texts(rows: Sequence[Row]) -> dict[int, tuple]:
    """Question and gold answers by index; empty where no reading of the sample has a question."""
    texts: dict[int, tuple] = {row["index"]: () for row in rows}
    return texts | {row["index"]: (row["question"], *row["answers"]) for row in rows if row["question"]}


def _without_answer(rows: Sequence[Row]) -> tuple[int, int]:
    """Failures and empty answers."""
    failures = sum(row["error"] is not None for row in rows)
    return failures, sum(row["error"] is None and not row["answer"].strip() for row in rows)
