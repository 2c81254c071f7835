"""Does the score depend on where in the document the evidence stands? Scores by tenth of the depth and length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memrl.evaluation.series import Row
from memrl.evaluation.tasks import Length

BINS = 10
FEW = 3  # cells with fewer readings are marked: their colour is mostly chance


@dataclass(frozen=True)
class DepthMap:
    """Mean score and number of readings, both [tenths, lengths]; the score is NaN where there is no reading."""

    lengths: tuple[Length, ...]
    score: np.ndarray
    count: np.ndarray


def tenths(depths: Sequence[float]) -> set[int]:
    """Which tenths of the document the depths fall into, 0 to 9: [0, 0.1), [0.1, 0.2), ... [0.9, 1]."""
    # Scaled and rounded first, since 0.3 * 10 is exactly 3 but 0.7 * 10 is 7.000000000000001 and 0.29 * 100 is below 29.
    return {min(BINS - 1, int(round(depth * BINS, 9))) for depth in depths}


def depth_map(rows: Mapping[Length, Sequence[Row]], score: str) -> DepthMap | None:
    """Mean score by depth and length; None where no row says where its evidence is.

    A reading with several pieces of evidence counts once in every tenth that holds one of them.
    """
    sums, count = np.zeros((BINS, len(rows))), np.zeros((BINS, len(rows)), dtype=np.int64)
    for column, several in enumerate(rows.values()):
        for row in several:
            for tenth in tenths(row["depths"]):
                sums[tenth, column] += row[score]
                count[tenth, column] += 1
    if not count.any():
        return None
    mean = np.divide(sums, count, out=np.full_like(sums, np.nan), where=count > 0)
    return DepthMap(tuple(rows), mean, count)
