"""The penalty of a turn whose length comes close to its cap (soft overlong punishment, DAPO, arXiv 2503.14476, section 3.4)."""

from collections.abc import Iterable, Mapping
from typing import Protocol


def overlong_penalty(num_tokens: int, cap: int, buffer: int) -> float:
    """0 up to `cap - buffer` tokens, from there linearly to -1 at the cap (DAPO, eq. 13).

        penalty = (cap - buffer - num_tokens) / buffer    between cap - buffer and cap; -1 beyond

    >>> overlong_penalty(768, 1024, 512)
    -0.5

    Args:
        num_tokens: response tokens of the turn.
        cap: most tokens that the turn may have.
        buffer: tokens below the cap in which the penalty grows; 0 turns it off.

    Raises ValueError for a buffer below 0 or above the cap.
    """
    if not 0 <= buffer <= cap:
        raise ValueError(f"an overlong buffer of {buffer} tokens does not fit a cap of {cap}; it must be between 0 and the cap")
    if buffer == 0:
        return 0.0
    return max(min((cap - buffer - num_tokens) / buffer, 0.0), -1.0)


class SampledTurn(Protocol):
    """What the penalty needs of a turn: see `memrl.types.Turn`."""

    kind: str
    response_ids: list[int]
    max_new_tokens: int


def trajectory_penalty(turns: Iterable[SampledTurn], buffers: Mapping[str, int]) -> float:
    """A trajectory's penalty: the mean over its turns of a kind, summed over the kinds that have a buffer.

    By the mean, all memory turns of a long document together weigh as much as those of a short one. Each turn's cap is the one
    that it was sampled with.

    Args:
        buffers: tokens by kind; a kind without a buffer, or with buffer 0, has no penalty.

    The result is between minus the number of kinds with a buffer, and 0.
    """
    turns, total = list(turns), 0.0
    for kind, buffer in buffers.items():
        found = [overlong_penalty(len(turn.response_ids), turn.max_new_tokens, buffer) for turn in turns if turn.kind == kind]
        if found:
            total += sum(found) / len(found)
    return total
