"""Does the score depend on where in the document the evidence stands? Scores by tenth of the depth and length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memrl.evaluation.tasks import Length
from memrl.report.report_numbers import sample_values
from memrl.report.series import Row

BINS = 10
FEW = 3  # cells with fewer samples are marked: their colour is mostly chance


@dataclass(frozen=True)
class DepthMap:
    """Mean score and number of samples, both [tenths, lengths]; the score is NaN where there is no sample."""

    lengths: tuple[Length, ...]
    score: np.ndarray
    count: np.ndarray


def tenths(depths: Sequence[float]) -> set[int]:
    """Which tenths of the document the depths fall into, 0 to 9: [0, 0.1), [0.1, 0.2), ... [0.9, 1]."""
    # Scaled and rounded first, since 0.3 * 10 is exactly 3 but 0.7 * 10 is 7.000000000000001 and 0.29 * 100 is below 29.
    return {min(BINS - 1, int(round(depth * BINS, 9))) for depth in depths}


def depth_map(rows: Mapping[Length, Sequence[Row]], score: str) -> DepthMap | None:
    """Mean score by depth and length; None where no row says where its evidence is.

    A sample with several pieces of evidence counts once in every tenth that holds one of them, with the mean over its readings.
    """
    mean, count = np.full((BINS, len(rows)), np.nan), np.zeros((BINS, len(rows)), dtype=np.int64)
    for column, several in enumerate(rows.values()):
        for tenth in range(BINS):
            values = sample_values([row for row in several if tenth in tenths(row["depths"])], score)
            if values:
                mean[tenth, column], count[tenth, column] = np.mean(list(values.values())), len(values)
    return DepthMap(tuple(rows), mean, count) if count.any() else None
