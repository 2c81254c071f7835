"""Was the gold answer written down, and was it retained? Computed from `held`: the answers in memory after each chunk, as digits.

Accuracy alone cannot separate a model that never wrote the answer down from one that lost it later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from memrl.report.series import Row
from memrl.scoring.evidence import is_traceable

MIN_READINGS, MIN_SHARE = 5, 0.1  # a point of a curve needs this many readings and this share of all readings
DRIFT = 0.1  # how unevenly characters are spread over a document's chunks, as a share of a chunk's characters


def is_traced(row: Row) -> bool:
    """Whether `held` is informative: it was recorded, and not all gold answers are "yes" or "no", which match any text."""
    return bool(row["held"] or not row["chunks"]) and (not row["answers"] or any(map(is_traceable, row["answers"])))


def retained_shares(row: Row) -> np.ndarray:
    """`held` as shares of the traceable gold answers, float64 [chunks].

    A digit is floor(9 k / n) for k of n such answers. For n up to 9, k = ceil(digit n / 9); for larger n that is the smallest k
    with this digit.

    Raises:
        ValueError: a character is not a digit.
    """
    digits = np.frombuffer(row["held"].encode("ascii", "replace"), dtype=np.uint8).astype(np.int64) - ord("0")
    if len(digits) and not (digits.min() >= 0 and digits.max() <= 9):
        raise ValueError(f"sample {row['id']}: held is {row['held'][:40]!r}; it must be one digit per chunk")
    num_answers = max(1, sum(map(is_traceable, row["answers"])))
    return -(-digits * num_answers // 9) / num_answers


def evidence_chunk(row: Row) -> int | None:
    """The chunk, from 0, with the last piece of evidence; None where it was not read or its place is unknown.

    A depth d is a share of the document's characters, and chunks are counted in tokens. With K chunks of T tokens the evidence is
    near chunk floor(d * tokens / T), and with chunks whose characters vary by DRIFT the error grows like a random walk, to about
    DRIFT sqrt(K) chunks, at least one. Within that error the nearest chunk with which the memory gains an answer is taken,
    because a memory cannot gain an answer before it was read. Without such a chunk the estimate itself is returned.
    """
    if not row["depths"] or not row["chunk_tokens"]:
        return None
    shares, count = retained_shares(row), -(-row["tokens"] // row["chunk_tokens"])
    # Rounded, because 3 / 22 * 220 is below 30.
    chunk = min(int(round(max(row["depths"]) * row["tokens"] / row["chunk_tokens"], 6)), count - 1)
    if chunk >= len(shares):
        return None
    gains = np.flatnonzero(np.diff(shares, prepend=0.0) > 0)
    near = gains[np.abs(gains - chunk) <= math.ceil(DRIFT * math.sqrt(count))]
    return int(near[np.abs(near - chunk).argmin()]) if len(near) else chunk


def offsets(longest: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, 16 ...: powers of two and the middles between them, up to `longest`."""
    steps = {0, 1} | {base * 2**k for base in (2, 3) for k in range(longest.bit_length())}
    return [after for after in sorted(steps) if after <= longest]


def retention_curve(rows: Sequence[Row]) -> list[dict[str, float]]:
    """Of traced readings: the mean share of the gold answers `held` in memory `after` chunks after the last piece of evidence.

    After 0 chunks the chunk with that piece has just been read. A reading counts if it has that many chunks after the evidence,
    so larger offsets have fewer readings `n`; those below MIN_READINGS or MIN_SHARE are left out. Failed readings count up to
    their failure.
    """
    aligned = [retained_shares(row)[chunk:] for row in rows if (chunk := evidence_chunk(row)) is not None]
    least = max(min(MIN_READINGS, len(aligned)), MIN_SHARE * len(aligned))
    points = []
    for after in offsets(max(map(len, aligned), default=0) - 1):
        values = [shares[after] for shares in aligned if len(shares) > after]
        if len(values) >= least:
            points.append({"after": after, "held": float(np.mean(values)), "n": len(values)})
    return points


def retention_at_end(rows: Sequence[Row]) -> dict[str, float] | None:
    """Of `n` traced readings: the mean shares of the gold answers in memory, `last` after the last chunk and `ever` at most.

    None where no reading has a memory. Readings that failed before their first chunk count as 0, as their answers count as wrong.
    """
    if not any(row["held"] for row in rows):
        return None
    shares = [retained_shares(row) if row["held"] else np.zeros(1) for row in rows]
    ever, last = np.mean([one.max() for one in shares]), np.mean([one[-1] for one in shares])
    return {"ever": float(ever), "last": float(last), "n": len(shares)}
