"""The penalty of a turn whose length comes close to its cap (soft overlong punishment, DAPO, arXiv 2503.14476, section 3.4)."""

from collections.abc import Mapping, Sequence


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


def trajectory_penalty(
    kinds: Sequence[str], lengths: Sequence[int], caps: Mapping[str, int], buffers: Mapping[str, int]
) -> float:
    """A trajectory's penalty: the mean over its turns of a kind, summed over the kinds that have a buffer.

    By the mean, all memory turns of a long document together weigh as much as those of a short one.

    Args:
        kinds, lengths: each turn's kind and number of response tokens.
        caps, buffers: tokens by kind; a kind without a buffer, or with buffer 0, has no penalty.

    The result is between minus the number of kinds with a buffer, and 0. Raises ValueError if a kind with a buffer has no cap, or
    if kinds and lengths differ in number.
    """
    total = 0.0
    for kind, buffer in buffers.items():
        if kind not in caps:
            raise ValueError(f"turns of kind {kind!r} have an overlong buffer but no cap; caps are known for {sorted(caps)}")
        selected = [length for name, length in zip(kinds, lengths, strict=True) if name == kind]
        if selected:
            total += sum(overlong_penalty(length, caps[kind], buffer) for length in selected) / len(selected)
    return total
