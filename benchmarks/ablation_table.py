"""Compare variants of a training run with their base in one table: accuracy, paired change and speed of learning.

Every variant of a seed reads the same documents as the base of that seed; documents differ between seeds. There are two kinds
of uncertainty, and neither replaces the other:

    documents   95% intervals over documents, for the models that were trained; other seeds may differ by more
    seeds       the lowest and the highest seed; three seeds are too few for an interval

A variant counts as different from the base only where the interval excludes 0 and all seeds change in the same direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memrl.evaluation.statistics import paired_interval, wilson_interval

LEVEL, WINDOW = 0.9, 5  # "learned": the mean reward of WINDOW steps reaches LEVEL
LAST_STEPS = 10


@dataclass(frozen=True)
class SeedResult:
    """One run.

    Attributes:
        right: by document length, for each document whether it was answered right after training.
        before: the same before RL; empty where the run began from the base's warm start.
        rewards: mean verifier reward of each step.
        seconds: time of all training steps together.
    """

    right: Mapping[int, Sequence[bool]]
    rewards: Sequence[float]
    seconds: float
    before: Mapping[int, Sequence[bool]] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """A setting: its runs and errors, both by seed; `note` is shown in the table where nothing was run."""

    name: str
    results: Mapping[int, SeedResult] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Estimate:
    """A mean, its 95% interval over documents, and the lowest and highest seed; all as shares of 1."""

    mean: float
    low: float
    high: float
    least: float
    most: float


def accuracy(rights: Sequence[Sequence[bool]]) -> Estimate:
    """Accuracy over the documents of all seeds, one sequence per seed; the interval is Wilson's."""
    shares = [sum(right) / len(right) for right in rights]
    successes, n = sum(map(sum, rights)), sum(map(len, rights))
    return Estimate(successes / n, *wilson_interval(successes, n), min(shares), max(shares))


def change(variant: Variant, base: Variant, length: int) -> Estimate | None:
    """Accuracy minus the base's on the same documents, over their common seeds; None if there is none.

    Raises:
        ValueError: variant and base read different numbers of documents.
    """
    gains, losses, n, shares = 0, 0, 0, []
    for seed in sorted(variant.results.keys() & base.results.keys()):
        pairs = list(zip(variant.results[seed].right[length], base.results[seed].right[length], strict=True))
        better, worse = (sum(mine == wanted and other != wanted for mine, other in pairs) for wanted in (True, False))
        gains, losses, n = gains + better, losses + worse, n + len(pairs)
        shares.append((better - worse) / len(pairs))
    if not shares:
        return None
    return Estimate((gains - losses) / n, *paired_interval(gains, losses, n), min(shares), max(shares))


def steps_to_level(rewards: Sequence[float], level: float = LEVEL, window: int = WINDOW) -> int | None:
    """The first step whose mean reward with the `window - 1` steps before it is at least `level`; None if there is none."""
    for end in range(window, len(rewards) + 1):
        if math.fsum(rewards[end - window : end]) / window >= level:
            return end
    return None


def by_accuracy(variants: Sequence[Variant], base: Variant, length: int) -> list[Variant]:
    """The base, then the others from the best to the worst at this length; those without a result come last."""

    def key(variant: Variant) -> tuple:
        rights = [result.right[length] for result in variant.results.values()]
        return variant is not base, not rights, -accuracy(rights).mean if rights else 0.0, variant.name

    return sorted(variants, key=key)


def format_table(variants: Sequence[Variant], base: Variant, lengths: Sequence[int]) -> str:
    """A Markdown table, one line per variant; percentages with [95% interval over documents] and (lowest to highest seed)."""
    longest = max(lengths)
    header = ["variant"]
    header += [f"{length} chunks" for length in lengths]
    header += [f"change at {length}" for length in lengths]
    header += [f"before RL at {longest}", f"reward, last {LAST_STEPS} steps", f"steps to {LEVEL:g}", "seconds", "seeds"]
    rows = [_row(variant, base, lengths) for variant in by_accuracy(variants, base, longest)]
    rows = [row + [""] * (len(header) - len(row)) for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def _row(variant: Variant, base: Variant, lengths: Sequence[int]) -> list[str]:
    if not variant.results:
        return [variant.name, variant.note or _failures(variant)]
    results = list(variant.results.values())
    changes = ["" if variant is base else _estimate(change(variant, base, length), sign="+") for length in lengths]
    before = [result.before[max(lengths)] for result in results if result.before]
    last = [math.fsum(result.rewards[-LAST_STEPS:]) / len(result.rewards[-LAST_STEPS:]) for result in results]
    failures = f"; {_failures(variant)}" if variant.errors else ""
    return [
        variant.name,
        *(_estimate(accuracy([result.right[length] for result in results])) for length in lengths),
        *changes,
        _estimate(accuracy(before)) if before else "as base",
        _spread(last, "{:.2f}"),
        _steps([steps_to_level(result.rewards) for result in results]),
        _spread([result.seconds for result in results], "{:.0f}"),
        f"{len(results)}{failures}",
    ]


def _estimate(value: Estimate | None, sign: str = "") -> str:
    if value is None:
        return "no seed in common"
    mean, low, high, least, most = (
        f"{100 * part + 0.0:{sign}.1f}" for part in (value.mean, value.low, value.high, value.least, value.most)
    )
    return f"{mean} [{low}, {high}] ({least} to {most})"


def _spread(values: Sequence[float], form: str) -> str:
    mean = math.fsum(values) / len(values)
    return f"{form.format(mean)} ({form.format(min(values))} to {form.format(max(values))})"


def _steps(values: Sequence[int | None]) -> str:
    reached = [value for value in values if value is not None]
    never = f"never in {len(values) - len(reached)} of {len(values)}" if len(reached) < len(values) else ""
    return "; ".join(part for part in (_spread(reached, "{:.0f}") if reached else "", never) if part)


def _failures(variant: Variant) -> str:
    # A bar would end the cell.
    return "failed: " + "; ".join(f"seed {seed}: {error}" for seed, error in variant.errors.items()).replace("|", "/")
