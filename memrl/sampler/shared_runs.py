"""Which runs of pages several rows have in common, so that attention reads them once for all of these rows."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Rows first .. last-1 (in the order of `RunPlan.order`) all see these pages, `num_tokens` of them."""

    first: int
    last: int
    pages: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class RunPlan:
    """`order` puts rows with common pages side by side; `covered[i]`: the leading pages of row order[i] that are in runs."""

    order: list[int]
    runs: list[Run]
    covered: list[int]


def find_runs(tables: Sequence[Sequence[int]], shareable: Sequence[int], page_size: int, min_saved: int) -> RunPlan:
    """The runs that spare at least `min_saved` tokens' reading each, from the longest common beginning down.

    Args:
        tables: every row's pages.
        shareable: how many of them may be in a run; all their tokens must count.
    """
    order = sorted(range(len(tables)), key=lambda row: tables[row])
    covered = [0] * len(order)
    runs: list[Run] = []

    def split(first: int, last: int, depth: int, begin: int) -> None:
        """Rows first .. last-1 agree on their first `depth` pages; those from `begin` on are in no run yet."""
        while first < last:
            table, limit = tables[order[first]], shareable[order[first]]
            end = first + 1
            if depth < limit:
                while end < last and depth < shareable[order[end]] and tables[order[end]][depth] == table[depth]:
                    end += 1
            if end - first > 1:
                common = depth + 1
                # Sorted tables: what the first and the last agree on, all between them agree on.
                other, limit = tables[order[end - 1]], min(shareable[row] for row in order[first:end])
                while common < limit and table[common] == other[common]:
                    common += 1
                rest = begin
                if (common - begin) * page_size * (end - first - 1) >= min_saved:
                    runs.append(Run(first, end, tuple(table[begin:common]), (common - begin) * page_size))
                    covered[first:end] = [common] * (end - first)
                    rest = common
                split(first, end, common, rest)
            first = end

    split(0, len(order), 0, 0)
    return RunPlan(order, runs, covered)
