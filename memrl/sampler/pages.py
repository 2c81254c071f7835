"""Allocate, share and find the pages of the key/value cache; plain Python, without tensors.

The cache consists of pages of `page_size` tokens. A row's tokens lie in the pages of its table, in order. Rows whose token ids
start alike share the pages of their common prefix: pages are reference-counted, and an index finds a page by its key (id of the
prefix before it, token ids in it). So equal prefixes are found by comparing token ids alone.

A page is in one of three states: in use (held by rows), cached (held by no row, but its content can still be found), or free.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

ROOT = 0  # id of the empty prefix

Key = tuple[int, tuple[int, ...]]  # (id of the prefix before the page, token ids)


@dataclass(frozen=True)
class Match:
    """The longest prefix of a prompt that is in the cache.

    Attributes:
        pages: full pages to share.
        prefix_ids: ids of the prefixes that consist of the first 0, 1, 2, ... of them.
        tail_page: a page that starts with the rest of the prompt except its last token. It has to be copied, because its owner
            continues to write after that part. None if there is none.
    """

    pages: list[int]
    prefix_ids: list[int]
    tail_page: int | None = None


class PagePool:
    """The state of every page, and the index of cached content."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages, self.page_size = num_pages, page_size
        self._ref_counts = [0] * num_pages
        self._free = list(range(num_pages))  # a heap: low numbers first, so that pages in use stay close together
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._index: dict[Key, tuple[int, int]] = {}  # key -> (page, id of the prefix that ends with the key's tokens)
        self._keys: dict[int, list[Key]] = {}  # all keys that lead to a page
        self._new_prefix_ids = count(ROOT + 1)
        self._peak_in_use = 0

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can return: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        return self.num_pages - self.num_available

    def is_cached(self, page: int) -> bool:
        """Whether no row holds the page, so that sharing it reduces `num_available`."""
        return page in self._cached

    def match(self, ids: Sequence[int]) -> Match:
        """The cached prefix of a prompt, always without the last token, whose logits still have to be computed."""
        size, last = self.page_size, len(ids) - 1
        pages: list[int] = []
        prefix_ids = [ROOT]
        for start in range(0, last, size):
            end = min(start + size, last)
            found = self._index.get((prefix_ids[-1], tuple(ids[start:end])))
            if found is None:
                break
            page, prefix_id = found
            if end - start < size:
                return Match(pages, prefix_ids, page)
            pages.append(page)
            prefix_ids.append(prefix_id)
        return Match(pages, prefix_ids)

    def allocate(self) -> int:
        """A page held once, with arbitrary content; evicts the oldest cached page if none is free."""
        if not self._free:
            self._evict_oldest()
        page = heapq.heappop(self._free)
        self._hold(page)
        return page

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages that `match` found."""
        for page in pages:
            if self._ref_counts[page] == 0:
                del self._cached[page]
            self._hold(page)

    def release(self, pages: Sequence[int]) -> None:
        """Release the pages of a row's table."""
        # The last page first: a page that is found only through another one is then evicted before it.
        for page in reversed(pages):
            if self._ref_counts[page] <= 0:
                raise AssertionError(f"page {page} was released twice")
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                if page in self._keys:
                    self._cached[page] = None
                else:
                    heapq.heappush(self._free, page)
        # At most as many cached pages as were ever in use at once: a long document must not fill the memory with content that is
        # not needed again.
        while len(self._cached) > self._peak_in_use:
            self._evict_oldest()

    def register(self, prefix_id: int, ids: tuple[int, ...], page: int) -> int:
        """Index a page that starts with `ids`, after the prefix `prefix_id`, unless an equal one is indexed already.

        Returns:
            The id of the prefix extended by `ids`.
        """
        key = (prefix_id, ids)
        if key not in self._index:
            self._index[key] = (page, next(self._new_prefix_ids))
            self._keys.setdefault(page, []).append(key)
        return self._index[key][1]

    def forget_all(self) -> None:
        """Clear the index: the weights have changed, or the pages' content was not computed."""
        self._index.clear()
        self._keys.clear()
        for page in self._cached:
            heapq.heappush(self._free, page)
        self._cached.clear()

    def _hold(self, page: int) -> None:
        self._ref_counts[page] += 1
        self._peak_in_use = max(self._peak_in_use, self.num_in_use)

    def _evict_oldest(self) -> None:
        page, _ = self._cached.popitem(last=False)
        for key in self._keys.pop(page):
            del self._index[key]
        heapq.heappush(self._free, page)
