"""Which pages of the key/value cache are taken, by whom, and what is in them: book-keeping without a tensor.

The cache is cut into pages of `page_size` tokens. A row's tokens lie in the pages of its table, in order. Rows whose token ids
begin alike share the pages of the common part: pages are counted by reference, and an index finds them again by
(what stands before, the page's own ids), so equal beginnings are found by comparing ids and by nothing else.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

ROOT = 0  # what stands before a prompt's first page

Key = tuple[int, tuple[int, ...]]  # (identity of what stands before, token ids)


@dataclass(frozen=True)
class Match:
    """The longest beginning of a prompt that is in the cache.

    Attributes:
        pages: full pages to share.
        node: identity of the last of them.
        tail_key, tail_page: a partly filled page that holds the rest of the prompt but for its last token: to be copied, because
            its owner goes on writing behind that part. None where there is none.
    """

    pages: list[int]
    node: int
    tail_key: Key | None = None
    tail_page: int | None = None

    def num_tokens(self, page_size: int) -> int:
        return len(self.pages) * page_size + (len(self.tail_key[1]) if self.tail_key else 0)


class PagePool:
    """Free pages, taken pages, and pages that nobody holds but that may be asked for again."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages, self.page_size = num_pages, page_size
        self._refs = [0] * num_pages
        self._free = list(range(num_pages))  # a heap: low numbers first, so pages in use stay close together
        self._kept: OrderedDict[int, None] = OrderedDict()  # not held, still in the index; oldest first
        self._index: dict[Key, tuple[int, int]] = {}  # full pages: key -> (page, node)
        self._tails: dict[Key, int] = {}
        self._keys: dict[int, list[Key]] = {}  # the keys under which a page can be found
        self._next_node = ROOT + 1
        self._held = self._most_held = 0

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give."""
        return len(self._free) + len(self._kept)

    @property
    def num_held(self) -> int:
        return self._held

    def is_kept(self, page: int) -> bool:
        """Whether nobody holds the page now, so that sharing it takes one from `num_available`."""
        return page in self._kept

    def match(self, ids: Sequence[int]) -> Match:
        """What of a prompt is there already; always without its last token, whose logits are still needed."""
        size, last = self.page_size, len(ids) - 1
        pages: list[int] = []
        node, start = ROOT, 0
        while start + size <= last:
            found = self._index.get((node, tuple(ids[start : start + size])))
            if found is None:
                return Match(pages, node)
            pages.append(found[0])
            node, start = found[1], start + size
        if start < last:
            key = (node, tuple(ids[start:last]))
            if key in self._tails:
                return Match(pages, node, key, self._tails[key])
        return Match(pages, node)

    def allocate(self) -> int:
        """An empty page, held once; the longest unasked-for one is forgotten where none is free."""
        if not self._free:
            self._forget_oldest()
        page = heapq.heappop(self._free)
        self._hold(page)
        return page

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages that `match` found."""
        for page in pages:
            if self._refs[page] == 0:
                del self._kept[page]
            self._hold(page)

    def release(self, pages: Sequence[int]) -> None:
        """Let go of a row's pages."""
        # The last page first: what is found only through another page is then forgotten before it.
        for page in reversed(pages):
            if self._refs[page] <= 0:
                raise AssertionError(f"page {page} was released twice")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._held -= 1
                if page in self._keys:
                    self._kept[page] = None
                else:
                    heapq.heappush(self._free, page)
        # As many as were ever in use at once: a long document must not fill the memory with what it will not look at again.
        while len(self._kept) > self._most_held:
            self._forget_oldest()

    def register(self, node: int, ids: tuple[int, ...], page: int) -> int:
        """Let a full page be found behind `node`; returns its identity, or that of an equal page that was there before."""
        key = (node, ids)
        known = self._index.get(key)
        if known is not None:
            return known[1]
        self._index[key] = (page, self._next_node)
        self._keys.setdefault(page, []).append(key)
        self._next_node += 1
        return self._next_node - 1

    def register_tail(self, node: int, ids: tuple[int, ...], page: int) -> Key | None:
        """Let a page be found that begins with `ids`, fewer than a page's; None where there is an equal one already."""
        key = (node, ids)
        if key in self._tails:
            return None
        self._tails[key] = page
        self._keys.setdefault(page, []).append(key)
        return key

    def forget_all(self) -> None:
        """Find nothing any more: the weights have changed, or what the pages hold was not computed."""
        self._index.clear()
        self._tails.clear()
        self._keys.clear()
        for page in self._kept:
            heapq.heappush(self._free, page)
        self._kept.clear()

    def check(self, holders: Sequence[Sequence[int]]) -> None:
        """AssertionError unless the books agree with each other and with the tables of all who hold pages."""
        counts = [0] * self.num_pages
        for table in holders:
            for page in table:
                counts[page] += 1
        assert counts == self._refs, "reference counts differ from the rows' tables"
        free, kept = set(self._free), set(self._kept)
        held = {page for page, count in enumerate(counts) if count}
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & kept and not (free | kept) & held, "a page is in two states"
        assert free | kept | held == set(range(self.num_pages)), "a page got lost"
        assert self._held == len(held)
        assert {page for page, _ in self._index.values()} | set(self._tails.values()) == set(self._keys)
        assert not free & set(self._keys), "a free page can be found"

    def _hold(self, page: int) -> None:
        self._refs[page] += 1
        if self._refs[page] == 1:
            self._held += 1
            self._most_held = max(self._most_held, self._held)

    def _forget_oldest(self) -> None:
        page, _ = self._kept.popitem(last=False)
        for key in self._keys.pop(page):
            if self._index.get(key, (None,))[0] == page:
                del self._index[key]
            if self._tails.get(key) == page:
                del self._tails[key]
        heapq.heappush(self._free, page)
