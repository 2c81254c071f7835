"""A check of the page pool's accounting, for the tests of the scheduler and the sampler."""

from collections.abc import Sequence

from memrl.sampler.pages import PagePool


def check_pages(pool: PagePool, tables: Sequence[Sequence[int]]) -> None:
    """AssertionError unless the pool's own records agree with each other and with the tables of all rows that hold pages."""
    counts = [0] * pool.num_pages
    for table in tables:
        for page in table:
            counts[page] += 1
    assert counts == pool._ref_counts, "reference counts differ from the rows' tables"
    free, cached = set(pool._free), set(pool._cached)
    in_use = {page for page, count in enumerate(counts) if count}
    assert len(free) == len(pool._free), "a page is free twice"
    assert not free & cached and not (free | cached) & in_use, "a page is in two states"
    assert free | cached | in_use == set(range(pool.num_pages)), "a page is in no state"
    assert pool.num_in_use == len(in_use)
    assert {page for page, _ in pool._index.values()} == set(pool._keys)
    assert not free & set(pool._keys), "a free page can be found"
