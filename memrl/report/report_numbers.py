"""Compute the report's numbers from rows: scores by length and depth, averages, paired comparisons, costs, retention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeVar

import numpy as np

from memrl.evaluation.accuracy_plot import Estimate
from memrl.evaluation.statistics import Difference, bootstrap_means, paired_bootstrap, paired_interval, score_interval
from memrl.evaluation.tasks import Length
from memrl.report.retention import is_traced, retention_at_end, retention_curve
from memrl.report.series import Cell, Row, Series, sort_lengths

BINS = 10  # of the depth
MIN_SAMPLES = 3  # cells of a depth map with fewer are marked: their colour is mostly chance

T = TypeVar("T")
Table = dict[str, dict[Length, T]]  # by series label and length


@dataclass(frozen=True)
class Score(Estimate):
    """A mean score over `n` samples; readings that failed and empty answers count as wrong."""

    n: int
    readings: int  # of these samples; more than n where samples were read several times
    failures: int  # readings that ended in an error
    empty: int  # readings with an empty answer


@dataclass(frozen=True)
class DepthMap:
    """Mean score and number of samples, both [tenths, lengths]; the score is NaN in cells without samples."""

    lengths: tuple[Length, ...]
    score: np.ndarray
    count: np.ndarray


@dataclass
class TaskNumbers:
    """The numbers of one task, by series label and mostly by length."""

    name: str
    unit: str
    baseline: Series  # which the others are compared with: the report's baseline if it has the task
    scores: Table[Score]
    differences: Table[Difference | None]
    costs: Table[dict[str, float | None]]
    retention: Table[list[dict[str, float]]]  # gold answers in memory after the evidence
    memory: Table[dict[str, float]]  # gold answers in memory at the end
    answered: Table[Score]  # of the readings of `memory`
    untraced: dict[str, int]  # number of readings left out of `retention` and `memory`, see `is_traced`
    depths: dict[str, DepthMap]

    def left_out(self) -> str:
        """What the picture of retention leaves out, in words; empty where it shows all readings."""
        count = sum(self.untraced.values())
        if not count:
            return ""
        readings = sum(score.readings for label in self.memory for score in self.scores[label].values())
        return f"left out: {count:,} of {readings:,} readings,\nwhose gold answers (yes, no) cannot be searched for"


@dataclass
class Report:
    """The numbers of a report."""

    series: Sequence[Series]
    baseline: Series
    score: str
    tasks: list[TaskNumbers]
    averaged: list[str]  # names of the tasks in `average`; empty where there is no average
    average: Table[Score]
    average_unit: str  # what the lengths of `average` count


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
    by_label = {one.label: one for one in series}
    if baseline is not None and baseline not in by_label:
        raise ValueError(f"baseline is {baseline!r}, and the series are {', '.join(map(repr, by_label))}; give one of them")
    base = series[0] if baseline is None else by_label[baseline]
    names = sorted({task for one in series for task, _ in one.rows})
    tasks = [_numbers_of(name, units.get(name, ""), series, base, score) for name in names]
    averaged = [task for task in ruler if task in names]
    average = {one.label: line for one in series if len(averaged) > 1 and (line := average_of(one, averaged, score))}
    if not average:
        return Report(series, base, score, tasks, [], {}, "")
    return Report(series, base, score, tasks, averaged, average, units.get(averaged[0], ""))


def _numbers_of(name: str, unit: str, series: Sequence[Series], chosen: Series, score: str) -> TaskNumbers:
    cells = {one.label: {length: cell for (task, length), cell in one.rows.items() if task == name} for one in series}
    rows = {label: line for label, line in cells.items() if line}
    base = next(one for one in (chosen, *series) if one.label in rows)
    traced = _by_cell(lambda cell: list(filter(is_traced, cell)), rows)
    memory = {label: line for label, line in _by_cell(retention_at_end, traced).items() if line}
    traced = {label: {length: traced[label][length] for length in line} for label, line in memory.items()}
    return TaskNumbers(
        name,
        unit,
        base,
        scores=_by_cell(lambda cell: score_of(cell, score), rows),
        differences={
            one.label: {length: compare(one, base, (name, length), score) for length in rows[one.label]}
            for one in series
            if one.label in rows and one is not base
        },
        costs=_by_cell(cost_of, rows),
        retention=_by_cell(retention_curve, traced),
        memory=memory,
        answered=_by_cell(lambda cell: score_of(cell, score), traced),
        untraced={label: sum(not is_traced(row) for cell in rows[label].values() for row in cell) for label in memory},
        depths={label: depths for label, line in rows.items() if (depths := depth_map(line, score))},
    )


def _by_cell(function: Callable[[list[Row]], T | None], rows: Table[list[Row]]) -> Table[T]:
    """The function's values, without those that are None or empty."""
    return {label: {length: value for length, cell in line.items() if (value := function(cell))} for label, line in rows.items()}


def sample_scores(rows: Sequence[Row], score: str) -> dict[int, float]:
    """The score of each sample by its index: the mean over its repeats."""
    values: dict[int, list[float]] = {}
    for row in rows:
        values.setdefault(row["index"], []).append(float(row[score]))
    return {index: fmean(repeats) for index, repeats in values.items()}


def score_of(rows: Sequence[Row], score: str) -> Score:
    """The score of one task and length."""
    values = list(sample_scores(rows, score).values())
    return _score(rows, len(values), fmean(values), *score_interval(values))


def average_of(series: Series, tasks: Sequence[str], score: str) -> dict[Length, Score]:
    """The mean over tasks, each with the same weight, at every length at which the series has all of them.

    The interval is the bootstrap's over samples within tasks: the tasks themselves are fixed, not drawn. Where every value
    is 0, or every value is 1, it is Wilson's over all samples.
    """
    result = {}
    lengths = [{length for name, length in series.rows if name == task} for task in tasks]
    for length in sort_lengths(set.intersection(*lengths)):
        rows = [row for task in tasks for row in series.rows[task, length]]
        values = [list(sample_scores(series.rows[task, length], score).values()) for task in tasks]
        pooled = [value for group in values for value in group]
        if set(pooled) in ({0.0}, {1.0}):
            low, high = score_interval(pooled)
        else:
            # A different seed for each task: equal seeds would correlate the tasks' draws.
            draws = np.sum([bootstrap_means(group, seed=seed) for seed, group in enumerate(values)], axis=0) / len(values)
            low, high = (float(bound) for bound in np.quantile(draws, [0.025, 0.975]))
        result[length] = _score(rows, len(pooled), fmean(map(fmean, values)), low, high)
    return result


def _score(rows: Sequence[Row], n: int, mean: float, low: float, high: float) -> Score:
    failures = sum(row["error"] is not None for row in rows)
    empty = sum(row["error"] is None and not row["answer"].strip() for row in rows)
    return Score(mean, low, high, n, len(rows), failures, empty)


def compare(series: Series, base: Series, cell: Cell, score: str) -> Difference | None:
    """`series` minus `base` on their common samples of a task and length; None if there are none.

    Samples are the same if index, question and gold answers are equal. A document that could not be made has no question; the
    index alone identifies it, so that the failure counts as wrong here too. The p-value is the sign-flip test's. The interval
    is Agresti and Min's where all scores are 0 or 1, else the bootstrap's.
    """
    cells = [one.rows.get(cell, ()) for one in (series, base)]
    (scores, base_scores), (texts, base_texts) = [sample_scores(rows, score) for rows in cells], [_texts(rows) for rows in cells]
    # The text of a document that could not be made is ().
    common = [k for k in scores if k in base_scores and len({texts[k], base_texts[k]} - {()}) < 2]
    if not common:
        return None
    a, b = (np.array([values[k] for k in common]) for values in (scores, base_scores))
    result = paired_bootstrap(a, b)
    if not np.isin([a, b], [0.0, 1.0]).all():
        return result
    low, high = paired_interval(int((a > b).sum()), int((a < b).sum()), len(common))
    return replace(result, low=low, high=high)


def _texts(rows: Sequence[Row]) -> dict[int, tuple]:
    """Question and gold answers by index; empty where no reading of the sample has a question."""
    texts: dict[int, tuple] = {row["index"]: () for row in rows}
    return texts | {row["index"]: (row["question"], *row["answers"]) for row in rows if row["question"]}


def cost_of(rows: Sequence[Row]) -> dict[str, float | None]:
    """The number of readings, means per reading, and the highest peak of memory; None if unrecorded."""
    names = ("seconds", "prompt_tokens", "response_tokens", "peak_gib")
    recorded = {name: [float(row[name]) for row in rows if row[name] is not None] for name in names}
    means = {name: fmean(values) if values else None for name, values in recorded.items()}
    return {"readings": len(rows)} | means | {"peak_gib": max(recorded["peak_gib"], default=None)}


def tenths(depths: Sequence[float]) -> set[int]:
    """The tenths of the document that the depths fall into, 0 to 9: [0, 0.1), [0.1, 0.2), ... [0.9, 1]."""
    # Scaled and rounded first, since 0.3 * 10 is exactly 3 but 0.7 * 10 is 7.000000000000001 and 0.29 * 100 is below 29.
    return {min(BINS - 1, int(round(depth * BINS, 9))) for depth in depths}


def depth_map(rows: Mapping[Length, Sequence[Row]], score: str) -> DepthMap | None:
    """Mean score by depth and length; None where no reading has a recorded depth.

    A sample with several pieces of evidence counts once in every tenth with one of them, with the mean over its readings.
    """
    mean, count = np.full((BINS, len(rows)), np.nan), np.zeros((BINS, len(rows)), dtype=np.int64)
    for column, readings in enumerate(rows.values()):
        for tenth in range(BINS):
            values = sample_scores([row for row in readings if tenth in tenths(row["depths"])], score)
            if values:
                mean[tenth, column], count[tenth, column] = np.mean(list(values.values())), len(values)
    return DepthMap(tuple(rows), mean, count) if count.any() else None


def has_other_version(one: Series, base: Series, task: str) -> bool:
    """Whether a task's version differs from the baseline's: equal questions may then have different documents."""
    return task in one.versions and task in base.versions and one.versions[task] != base.versions[task]
