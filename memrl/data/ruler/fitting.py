"""Build a document that fills a number of tokens, counting the tokens of whole documents one to three times.

A document is built from a number of *units* (words, lines, characters of a text), and its tokens grow nearly in proportion to
them. The tokens of a few slices give the number of units to within a percent; counting the whole document once gives it to within
a small fraction of that, and a second count confirms it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

_SHORT = 100_000  # characters; the tokens of a longer document are estimated from slices
_SLICES, _SHARE = 64, 0.125  # number of slices, and their share of the document
_ESTIMATES, _PASSES = 3, 16
_SLACK = 0.002  # share of the budget that may stay empty


@dataclass(frozen=True)
class Document:
    """
    Attributes:
        context: the text.
        places: where each piece of evidence begins, in characters.
        facts: further metadata of the sample.
        answers: the gold answers if they depend on the number of units; else None.
    """

    context: str
    places: tuple[int, ...] = ()
    facts: dict = field(default_factory=dict)
    answers: tuple[str, ...] | None = None


class TooShort(ValueError):
    """Not even the smallest document fits; it has `.tokens` tokens."""

    def __init__(self, tokens: int):
        super().__init__(f"the smallest document takes {tokens} tokens")
        self.tokens = tokens


def fit(
    build: Callable[[int], Document],
    count: Callable[[str], int],
    budget: int,
    smallest: int,
    step: int,
) -> tuple[Document, int]:
    """The document that fills `budget` tokens to within 0.2%, or as nearly as its units allow, and its tokens.

    Args:
        build: the document of a number of units; the tokens grow with the units.
        count: tokens of a text.
        budget: never exceeded.
        smallest: the fewest units that make a document.
        step: units to add for a second document, whose tokens give a first estimate of the tokens per unit.

    Raises:
        TooShort: the smallest document takes more than the budget.
    """
    best = build(smallest)
    base = tokens = count(best.context)
    if base > budget:
        raise TooShort(base)
    rate = max(1, count(build(smallest + step).context) - base) / step
    least = rate / 10  # bounds the next guess if more units add no tokens
    aim = budget * (1 - _SLACK / 2)
    units = max(smallest + 1, smallest + round((aim - base) / rate))
    for _ in range(_ESTIMATES):
        tried = units
        rate = max(least, (_estimate(build(units).context, count) - base) / (units - smallest))
        units = max(smallest + 1, smallest + round((aim - base) / rate))
        if abs(units - tried) <= 0.02 * tried:  # the rate holds over so short a distance
            break
    below, above = smallest, None  # numbers of units: one that fits, and one that does not
    for _ in range(_PASSES):
        document = build(units)
        found = count(document.context)
        if found <= budget:
            below, best, tokens = units, document, found
            if budget - found <= _SLACK * budget:
                break
        else:
            above = units
        rate = max(least, (found - base) / (units - smallest))
        units = max(units + round((aim - found) / rate), below + 1)
        if above is not None:
            units = min(units, above - 1)
            if units <= below:
                break
    return best, tokens


def _estimate(text: str, count: Callable[[str], int]) -> float:
    """Estimate a text's tokens; those of a long text from evenly spaced slices, cut at white space."""
    if len(text) <= _SHORT:
        return count(text)
    stratum = len(text) / _SLICES
    characters = tokens = 0
    for index in range(_SLICES):
        edges = stratum * (index + 0.5 - _SHARE / 2), stratum * (index + 0.5 + _SHARE / 2)
        begin, end = (_white_space(text, int(edge)) for edge in edges)
        characters += end - begin
        tokens += count(text[begin:end])
    return tokens * len(text) / max(1, characters)


def _white_space(text: str, place: int) -> int:
    """The next white space from `place` on, if there is any within 100 characters; else `place`."""
    for near in range(place, min(place + 100, len(text))):
        if text[near].isspace():
            return near
    return min(place, len(text))
