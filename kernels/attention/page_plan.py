"""The plan of batched attention over pages: one batch entry per page, and the parts to merge for each row."""

from dataclasses import dataclass

import torch
from torch import Tensor

DENSE_ENOUGH = 2 / 3  # a range of pages is read in place if at least this part of it is in use


@dataclass
class PagePlan:
    """Attention to `n` pages, each by the one row that owns it.

    Attributes:
        chosen: the pages, as a slice of the pool if they (nearly) fill one, otherwise as indices.
        owners: int64 [n], the row that owns each page.
        filled: int64 [n], number of valid tokens in the page; 0 for a page inside the slice that no row owns.
        parts: int64 [B, M], index among the n pages of row b's m-th page; 0 if row b has fewer pages.
        absent: bool [B, M], True if row b has fewer pages.
        page_size: tokens of a page.
        full: whether every page is filled.
    """

    chosen: slice | Tensor
    owners: Tensor
    filled: Tensor
    parts: Tensor
    absent: Tensor
    page_size: int
    full: bool
    _bias: Tensor | None = None

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """[n, 1, 1, page_size]: 0 for valid tokens, -inf for the others; None if all are valid."""
        if self.full:
            return None
        if self._bias is None:
            beyond = torch.arange(self.page_size, device=self.filled.device) >= self.filled[:, None]
            self._bias = torch.zeros(beyond.shape, dtype=dtype, device=self.filled.device).masked_fill_(beyond, -torch.inf)
        return self._bias[:, None, None, :]


def plan_pages(tables: Tensor, lengths: Tensor, page_size: int, device: torch.device | str) -> PagePlan:
    """Arguments as in `AttentionBackend.plan_pages`."""
    counts = (lengths + page_size - 1) // page_size
    present = torch.arange(int(counts.max())) < counts[:, None]
    rows, columns = present.nonzero(as_tuple=True)
    pages = tables[rows, columns]
    filled = (lengths[rows] - columns * page_size).clamp(max=page_size)
    chosen, places = pages, torch.arange(len(pages))
    low, high = int(pages.min()), int(pages.max()) + 1
    in_range = torch.bincount(pages - low, minlength=high - low)
    if int(in_range.max()) == 1 and len(pages) >= DENSE_ENOUGH * (high - low):
        chosen, places = slice(low, high), pages - low
        rows = torch.zeros(high - low, dtype=torch.int64).index_copy_(0, places, rows)
        filled = torch.zeros(high - low, dtype=torch.int64).index_copy_(0, places, filled)
    parts = torch.zeros(present.shape, dtype=torch.int64)
    parts[present] = places
    full = bool((filled == page_size).all())
    if device != "cpu" and torch.device(device).type != "cpu":
        chosen = chosen.to(device) if isinstance(chosen, Tensor) else chosen
        rows, filled, parts, present = (t.to(device) for t in (rows, filled, parts, present))
    return PagePlan(chosen, rows, filled, parts, ~present, page_size, full)
