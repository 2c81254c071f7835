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

ROOT = 0  # id of the empty prefix

Key = tuple[int, tuple[int, ...]]  # (id of the prefix before the page, token ids)


@dataclass(frozen=True)
class Match:
    """The longest prefix of a prompt that is in the cache.

    Attributes:
        pages: full pages to share.
        prefix_id: id of the prefix that ends with the last of them.
        tail_key, tail_page: a partly filled page with the rest of the prompt except its last token. It has to be copied, because
            its owner continues to write after that part. None if there is none.
    """

    pages: list[int]
    prefix_id: int
    tail_key: Key | None = None
    tail_page: int | None = None

    def num_tokens(self, page_size: int) -> int:
        return len(self.pages) * page_size + (len(self.tail_key[1]) if self.tail_key else 0)


class PagePool:
    """The state of every page, and the index of cached content."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages, self.page_size = num_pages, page_size
        self._ref_counts = [0] * num_pages
        self._free = list(range(num_pages))  # a heap: low numbers first, so that pages in use stay close together
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._index: dict[Key, tuple[int, int]] = {}  # full pages: key -> (page, id of the prefix that ends with it)
        self._tails: dict[Key, int] = {}  # partly filled pages
        self._keys: dict[int, list[Key]] = {}  # all keys that lead to a page
        self._next_prefix_id = ROOT + 1
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
        prefix_id, start = ROOT, 0
        while start + size <= last:
            found = self._index.get((prefix_id, tuple(ids[start : start + size])))
            if found is None:
                return Match(pages, prefix_id)
            pages.append(found[0])
            prefix_id, start = found[1], start + size
        if start < last:
            key = (prefix_id, tuple(ids[start:last]))
            if key in self._tails:
                return Match(pages, prefix_id, key, self._tails[key])
        return Match(pages, prefix_id)

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
        """Index a full page after the prefix `prefix_id`; returns the id of the prefix extended by the page."""
        key = (prefix_id, ids)
        known = self._index.get(key)
        if known is not None:
            return known[1]
        self._index[key] = (page, self._next_prefix_id)
        self._keys.setdefault(page, []).append(key)
        self._next_prefix_id += 1
        return self._next_prefix_id - 1

    def register_tail(self, prefix_id: int, ids: tuple[int, ...], page: int) -> Key | None:
        """Index a page that starts with `ids`, fewer than a page's; None if such a page is indexed already."""
        key = (prefix_id, ids)
        if key in self._tails:
            return None
        self._tails[key] = page
        self._keys.setdefault(page, []).append(key)
        return key

    def forget_all(self) -> None:
        """Clear the index: the weights have changed, or the pages' content was not computed."""
        self._index.clear()
        self._tails.clear()
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
            if self._index.get(key, (None,))[0] == page:
                del self._index[key]
            if self._tails.get(key) == page:
                del self._tails[key]
        heapq.heappush(self._free, page)
