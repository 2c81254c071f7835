"""Bounds of numeric options, given beside the dataclass fields they belong to, and one check for all of them."""

from __future__ import annotations

import math
from dataclasses import Field, field, fields, is_dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


class Bounds(NamedTuple):
    """What a number may be: from `low` to `high`, or strictly between them if `is_open`."""

    low: float
    high: float
    is_open: bool
    why: str

    def allow(self, value: float) -> bool:
        inside = self.low < value < self.high if self.is_open else self.low <= value <= self.high
        return inside and math.isfinite(value)

    def __str__(self) -> str:
        if self.is_open:
            below = "" if math.isinf(self.high) else f" and below {self.high}"
            return "positive" if self.low == 0 and not below else f"above {self.low}{below}"
        return f"at least {self.low}" if math.isinf(self.high) else f"between {self.low} and {self.high}"


def bounded(
    default: T,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    *,
    above: float | None = None,
    below: float = math.inf,
    why: str = "",
) -> T:
    """A dataclass field with bounds: inclusive ones, or exclusive ones from `above`; `why` ends the message of a refusal."""
    bounds = Bounds(at_least, at_most, False, why) if above is None else Bounds(above, below, True, why)
    return field(default=default, metadata={"bounds": bounds})


def bounds_of(item: Field) -> Bounds | None:
    return item.metadata.get("bounds")


def check_options(options: DataclassInstance, prefix: str = "") -> None:
    """Check every field of `options`, and of the dataclasses in it, against its bounds.

    Raises:
        ValueError: names a field, its value and what is allowed; also for None where the type does not allow it, because the
            parser accepts a null in a YAML file for any type.
    """
    for item in fields(options):
        name, value, bounds = f"{prefix}{item.name}", getattr(options, item.name), bounds_of(item)
        may_be_none = str(item.type).endswith("None")
        if value is None and not may_be_none:
            raise ValueError(f"{name} is null; give it a value or remove its line")
        if bounds is not None and value is not None and not bounds.allow(value):
            allowed = f"{bounds}{', or null' if may_be_none else ''}"
            raise ValueError(f"{name} is {value}; it must be {allowed}{bounds.why and f'; {bounds.why}'}")
        if is_dataclass(value) and not isinstance(value, type):
            check_options(value, f"{name}.")
