"""The report's numbers, from rows: scores by task and length, averages, paired comparisons, costs. No drawing, no text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memrl.evaluation.statistics import (
    Difference,
    bootstrap_means,
    paired_bootstrap,
    paired_interval,
    score_interval,
    wilson_interval,
)
from memrl.evaluation.tasks import Length
from memrl.report.series import Cell, Row, Series, cell_order


@dataclass(frozen=True)
class Score:
    """A mean score with its 95% interval.

    Attributes:
        n: samples.
        readings: of them; more than n where samples were read several times.
        failures: readings without an answer, for whatever reason; they count as wrong.
        empty: readings with an empty answer; they count as wrong as well.
    """

    mean: float
    low: float
    high: float
    n: int
    readings: int
    failures: int
    empty: int


@dataclass(frozen=True)
class Cost:
    """Means per reading, and the highest peak of memory; None where no row tells."""

    readings: int
    seconds: float | None
    prompt_tokens: float | None
    response_tokens: float | None
    peak_gib: float | None


def sample_values(rows: Sequence[Row], score: str) -> dict[int, float]:
    """A sample's score by its index: the mean over its repeats."""
    values: dict[int, list[float]] = {}
    for row in rows:
        values.setdefault(row["index"], []).append(float(row[score]))
    return {index: math.fsum(several) / len(several) for index, several in values.items()}


def score_of(rows: Sequence[Row], score: str) -> Score:
    """The score of one task and length."""
    values = list(sample_values(rows, score).values())
    return Score(math.fsum(values) / len(values), *score_interval(values), len(values), len(rows), *_without_answer(rows))


def scores_by_cell(series: Series, score: str) -> dict[Cell, Score]:
    return {cell: score_of(rows, score) for cell, rows in series.rows.items()}


def average_of(series: Series, tasks: Sequence[str], score: str) -> dict[Length, Score]:
    """The mean over tasks, each with the same weight, at every length at which the series has all of them.

    The interval is the bootstrap's over samples within tasks: which tasks there are is not left to chance. Where every value
    is 0, or every value is 1, it is Wilson's over all samples.
    """
    lengths = {length for task, length in series.rows if task in tasks}
    complete = [length for length in lengths if all((task, length) in series.rows for task in tasks)]
    result = {}
    for length in sorted(complete, key=lambda length: cell_order(("", length))):
        groups = [series.rows[task, length] for task in tasks]
        values = [list(sample_values(rows, score).values()) for rows in groups]
        pooled = [value for group in values for value in group]
        mean = math.fsum(math.fsum(group) / len(group) for group in values) / len(values)
        if len({*pooled, 0.0}) == 1 or len({*pooled, 1.0}) == 1:
            low, high = wilson_interval(math.fsum(pooled), len(pooled))
        else:
            # A seed of its own for each task: equal ones would move all tasks up and down together.
            draws = sum(bootstrap_means(group, seed=seed) for seed, group in enumerate(values)) / len(values)
            low, high = (float(bound) for bound in np.quantile(draws, [0.025, 0.975]))
        rows = [row for group in groups for row in group]
        result[length] = Score(mean, low, high, len(pooled), len(rows), *_without_answer(rows))
    return result


def compare(series: Series, base: Series, cell: Cell, score: str) -> Difference | None:
    """`series` minus `base` on the samples of a task and length that both have; None where there is none.

    Samples are the same if index, question and gold answers are; where a document could not be made there is no question, and
    the index alone decides, so that the failure counts as wrong here too. The p-value is the sign-flip test's. The interval is
    Agresti and Min's where all scores are 0 or 1, else the bootstrap's.
    """
    mine, other = series.rows.get(cell, ()), base.rows.get(cell, ())
    a, b = sample_values(mine, score), sample_values(other, score)
    texts, other_texts = _texts(mine), _texts(other)
    both = [
        index for index in a if index in b and (not texts[index] or not other_texts[index] or texts[index] == other_texts[index])
    ]
    if not both:
        return None
    a, b = [a[index] for index in both], [b[index] for index in both]
    result = paired_bootstrap(a, b)
    if {*a, *b} <= {0.0, 1.0}:
        gains, losses = sum(x > y for x, y in zip(a, b, strict=True)), sum(x < y for x, y in zip(a, b, strict=True))
        low, high = paired_interval(gains, losses, len(both))
        return Difference(result.mean, low, high, result.p_value, result.n)
    return result


def cost_of(rows: Sequence[Row]) -> Cost:
    def known(name: str) -> list[float]:
        return [float(row[name]) for row in rows if row[name] is not None]

    means = {name: known(name) for name in ("seconds", "prompt_tokens", "response_tokens")}
    return Cost(
        readings=len(rows),
        **{name: math.fsum(values) / len(values) if values else None for name, values in means.items()},
        peak_gib=max(known("peak_gib"), default=None),
    )


def baseline_of(task: str, series: Sequence[Series], chosen: Series) -> Series:
    """What the others are compared with on a task: the chosen series, or the first that has the task where it has not."""
    return next(one for one in (chosen, *series) if any(name == task for name, _ in one.rows))


def has_other_version(one: Series, base: Series, task: str) -> bool:
    """Whether a task's version is not the baseline's: equal questions may come with other documents then."""
    return task in one.versions and task in base.versions and one.versions[task] != base.versions[task]


def _texts(rows: Sequence[Row]) -> dict[int, tuple]:
    """Question and gold answers by index; empty where no reading of the sample has a question."""
    texts: dict[int, tuple] = {row["index"]: () for row in rows}
    return texts | {row["index"]: (row["question"], *row["answers"]) for row in rows if row["question"]}


def _without_answer(rows: Sequence[Row]) -> tuple[int, int]:
    failures = sum(row["error"] is not None for row in rows)
    return failures, sum(row["error"] is None and not row["answer"].strip() for row in rows)
