"""Bounds of numeric options, given beside the dataclass fields they belong to, and one check for all of them."""

from __future__ import annotations

import math
import re
from dataclasses import Field, field, fields, is_dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


# Where nothing else is given: PyTorch's 64-bit integers and fp32 numbers, with room to multiply. What is above is a mistake.
MOST_INT, MOST_FLOAT, MOST_VALUES = 2**31 - 1, 1e30, 1000
# For several commands: threads of a process, sequences in a batch, and GiB of memory (the largest single machines have 50,000).
MAX_THREADS, MAX_ROWS, MAX_GIB = 1024, 65_536, 1_000_000


class Bounds(NamedTuple):
    """What a number may be: from `low` to `high`, without them if `open_low` or `open_high`."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    why: str = ""

    def allow(self, value: float) -> bool:
        is_above = self.low < value if self.open_low else self.low <= value
        return is_above and (value < self.high if self.open_high else value <= self.high) and abs(value) <= self.most(value)

    def most(self, value: float) -> float:
        """The largest number of this type, if there is no other bound."""
        return max(MOST_INT if isinstance(value, int) else MOST_FLOAT, self.high if math.isfinite(self.high) else 0)

    def __str__(self) -> str:
        low = "positive" if self.open_low and self.low == 0 else f"{'above' if self.open_low else 'at least'} {self.low}"
        if math.isinf(self.high):
            return "" if math.isinf(self.low) else low
        if not (self.open_low or self.open_high):
            return f"between {self.low} and {self.high}"
        low = f"above {self.low}" if self.open_low else low
        return f"{low} and {'below' if self.open_high else 'at most'} {self.high}"


def bounded(
    default: T,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    *,
    above: float | None = None,
    below: float | None = None,
    why: str = "",
) -> T:
    """A dataclass field with bounds: inclusive ones, or exclusive ones from `above` and `below`; `why` ends the refusal."""
    low, high = at_least if above is None else above, at_most if below is None else below
    return field(default=default, metadata={"bounds": Bounds(low, high, above is not None, below is not None, why)})


def bounds_of(item: Field) -> Bounds | None:
    return item.metadata.get("bounds")


def check_options(options: DataclassInstance, prefix: str = "") -> None:
    """Check every field of `options`, and of the dataclasses in it, against its bounds.

    Raises:
        ValueError: names a field, its value and what is allowed; also for None where the type does not allow it, because the
            parser accepts a null in a YAML file for any type.
    """
    for item in fields(options):
        name, value, bounds = f"{prefix}{item.name}", getattr(options, item.name), bounds_of(item) or Bounds()
        may_be_none = str(item.type).endswith("None")
        if value is None and not may_be_none:
            raise ValueError(f"{name} is null; give it a value or remove its line")
        values = value if isinstance(value, list) else [value]
        if len(values) > MOST_VALUES:
            raise ValueError(f"{name} holds {len(values)} values; give at most {MOST_VALUES}")
        for number in values:
            if isinstance(number, int | float) and not isinstance(number, bool) and not bounds.allow(number):
                raise ValueError(f"{name} is {_short(number)}; it must be {_allowed(number, bounds, may_be_none)}")
        if is_dataclass(value) and not isinstance(value, type):
            check_options(value, f"{name}.")


def _allowed(number: float, bounds: Bounds, may_be_none: bool) -> str:
    limits = [str(bounds)]
    if abs(number) > bounds.most(number) and math.isinf(bounds.high):
        limits.append(f"at most {bounds.most(number)}")
    return (" and ".join(filter(None, limits)) or "a number") + ", or null" * may_be_none + (bounds.why and f"; {bounds.why}")


def _short(number: float) -> str:
    text = str(number)
    return text if len(text) <= 30 else f"{text[:20]}... ({len(text)} digits)"


def read_length(text: str) -> int | None:
    """`800`, `32k` or `1m` (k is 1024, m is 1024 * 1024) as a whole number of at least 1; None for anything else."""
    match = re.fullmatch(r"\s*(\d{1,15})\s*([kKmM]?)\s*", text, re.ASCII)
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()] or None if match else None
