"""Scores by document length and by the tenth of the document in which the evidence stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memrl.evaluation.tasks import Length
from memrl.report.series import Row, sample_scores

BINS = 10
MIN_SAMPLES = 3  # cells with fewer are marked: their colour is mostly chance


@dataclass(frozen=True)
class DepthMap:
    """Mean score and number of samples, both [tenths, lengths]; the score is NaN in cells without samples."""

    lengths: tuple[Length, ...]
    score: np.ndarray
    count: np.ndarray


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
