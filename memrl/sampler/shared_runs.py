"""Find runs of pages that several rows share, so that attention reads them once for all of these rows."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Rows first .. last-1 (positions in `RunPlan.order`) all see these pages, `num_tokens` tokens in total."""

    first: int
    last: int
    pages: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class RunPlan:
    """`order` places rows with common pages next to each other; `covered[i]`: number of leading pages of row order[i] in runs."""

    order: list[int]
    runs: list[Run]
    covered: list[int]


def find_runs(tables: Sequence[list[int]], shareable: Sequence[int], page_size: int, min_saved: int) -> RunPlan:
    """Runs that save reading at least `min_saved` tokens each, found from the longest common prefix down.

    Args:
        tables: every row's pages.
        shareable: how many leading pages of each row may be in a run; all their tokens must be valid.
    """
    order = sorted(range(len(tables)), key=lambda row: tables[row])
    covered = [0] * len(order)
    runs: list[Run] = []

    def split(first: int, last: int, num_common: int, num_assigned: int) -> None:
        """Rows first .. last-1 share their first `num_common` pages, of which the first `num_assigned` are in runs already."""
        while first < last:
            table, limit = tables[order[first]], shareable[order[first]]
            end = first + 1
            if num_common < limit:
                page = table[num_common]
                while end < last and num_common < shareable[order[end]] and tables[order[end]][num_common] == page:
                    end += 1
            if end - first > 1:
                # The tables are sorted: pages common to the first and the last row are common to all rows between.
                other, limit = tables[order[end - 1]], min(shareable[row] for row in order[first:end])
                common, assigned = num_common + 1, num_assigned
                while common < limit and table[common] == other[common]:
                    common += 1
                num_tokens = (common - assigned) * page_size
                if num_tokens * (end - first - 1) >= min_saved:
                    runs.append(Run(first, end, tuple(table[assigned:common]), num_tokens))
                    covered[first:end] = [common] * (end - first)
                    assigned = common
                split(first, end, common, assigned)
            first = end

    split(0, len(order), 0, 0)
    return RunPlan(order, runs, covered)
