"""Was the gold answer noted, and was it kept? Read off `held`, the share of the gold answers in the memory after each chunk.

Accuracy alone does not tell a model that never wrote the answer down from one that wrote it down and lost it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memrl.report.series import Row
from memrl.scoring.evidence import is_traceable

MIN_READINGS, MIN_SHARE = 5, 0.1  # fewer readings that go on so long after their evidence make no point of a curve
DRIFT = 0.1  # how unevenly characters are spread over a document's chunks, as a share of a chunk's characters


@dataclass(frozen=True)
class Point:
    """The mean share of the gold answers in memory, so many chunks after the evidence's; over `n` readings."""

    after: int
    held: float
    n: int


@dataclass(frozen=True)
class Kept:
    """Means over all readings of one length.

    Attributes:
        ever: the largest share of the gold answers that the memory held after any chunk.
        last: the share that it held after the last chunk.
    """

    ever: float
    last: float
    n: int


def is_traced(row: Row) -> bool:
    """Whether `held` can tell what the memory held: not where chunks were read without it, and not if the gold answers are "yes"
    or "no", whose words stand everywhere."""
    return bool(row["held"] or not row["chunks"]) and (not row["answers"] or any(map(is_traceable, row["answers"])))


def held_shares(row: Row) -> np.ndarray:
    """`held` as shares of the gold answers that can be traced, float64 [chunks].

    A digit is floor(9 k / n) for k of n such answers, which gives k back for n up to 9: k = ceil(digit n / 9). With more gold
    answers it is the smallest k that has this digit.

    Raises:
        ValueError: something else than digits.
    """
    digits = np.frombuffer(row["held"].encode("ascii", "replace"), dtype=np.uint8).astype(np.int64) - ord("0")
    if len(digits) and not (digits.min() >= 0 and digits.max() <= 9):
        raise ValueError(f"sample {row['id']}: held is {row['held'][:40]!r}; it has to be one digit per chunk")
    num_answers = max(1, sum(map(is_traceable, row["answers"])))
    return -(-digits * num_answers // 9) / num_answers


def evidence_chunk(row: Row) -> int | None:
    """The chunk, from 0, in which the last piece of evidence was read; None where it was not read or its place is not known.

    A depth d is a share of the document's characters, and chunks are counted in tokens. With K chunks of T tokens the evidence is
    near chunk floor(d * tokens / T), and with chunks whose characters vary by DRIFT the error grows like a random walk, to about
    DRIFT sqrt(K) chunks, one at least. Within it, the chunk with which the memory gains an answer is taken, the nearest if
    there are several: memory cannot gain what was not read. If it gains nothing there, the estimate stands.
    """
    if not row["depths"] or not row["chunk_tokens"]:
        return None
    shares, count = held_shares(row), -(-row["tokens"] // row["chunk_tokens"])
    # Rounded, because 3 / 22 * 220 is below 30.
    chunk = min(int(round(max(row["depths"]) * row["tokens"] / row["chunk_tokens"], 6)), count - 1)
    if chunk >= len(shares):
        return None
    gains = np.flatnonzero(np.diff(shares, prepend=0.0) > 0)
    near = gains[np.abs(gains - chunk) <= math.ceil(DRIFT * math.sqrt(count))]
    return int(near[np.abs(near - chunk).argmin()]) if len(near) else chunk


def offsets(longest: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, 16 ...: powers of two and the middles between them, up to `longest`."""
    powers = [2**k for k in range(longest.bit_length())]
    middles = [3 * power // 2 for power in powers if power > 1]
    return [after for after in sorted({0, *powers, *middles}) if after <= longest]


def retention(rows: Sequence[Row]) -> list[Point]:
    """How much of the gold answers is in memory 0, 1, 2, 3, 4, 6, 8 ... chunks after the chunk of the evidence.

    At 0 the chunk that holds the (last piece of) evidence has just been read. A reading counts at an offset if its document goes
    on for so long, so there are fewer the larger it is; offsets with fewer than a tenth of the readings, or than MIN_READINGS if
    there are so many, are left out. Failed readings count as far as they came.

    Args:
        rows: those that are traced (`is_traced`).
    """
    aligned = [held_shares(row)[chunk:] for row in rows if (chunk := evidence_chunk(row)) is not None]
    if not aligned:
        return []
    sizes = np.array([len(shares) for shares in aligned])
    points = []
    for after in offsets(int(sizes.max()) - 1):
        values = [shares[after] for shares in aligned if len(shares) > after]
        if len(values) >= max(min(MIN_READINGS, len(aligned)), MIN_SHARE * len(aligned)):
            points.append(Point(after, float(np.mean(values)), len(values)))
    return points


def kept(rows: Sequence[Row]) -> Kept | None:
    """What the memory ever held, and what it held at the end; None where no row has a memory.

    Readings that failed before their first chunk count as never having held anything, because their answers count as wrong.

    Args:
        rows: those that are traced (`is_traced`).
    """
    if not any(row["held"] for row in rows):
        return None
    shares = [held_shares(row) if row["held"] else np.zeros(1) for row in rows]
    ever, last = np.mean([one.max() for one in shares]), np.mean([one[-1] for one in shares])
    return Kept(float(ever), float(last), len(shares))
