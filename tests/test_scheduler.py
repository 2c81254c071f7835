"""Scheduler and page accounting under random schedules. A fake model stores each token's past in the cache and checks it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memrl.sampler.pages import PagePool
from memrl.sampler.sampling import SamplingParams
from memrl.sampler.scheduler import Request, Scheduler
from memrl.sampler.shared_runs import find_runs
from tests.page_accounting import check_pages


class FakeCache:
    """Stands for the forward pass: every slot holds the tokens up to and including its own."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.num_computed = 0

    def run(self, step):
        size = self.scheduler.pool.page_size
        copied = {
            (target, place): self.slots[source, place]
            for source, target in step.copies
            for place in range(size)
            if (source, place) in self.slots
        }
        assert {target for _, target in step.copies} <= set(step.new_pages)
        for page in step.new_pages:
            for place in range(size):
                self.slots.pop((page, place), None)
        self.slots |= copied
        work = [(chunk.row, chunk.start, chunk.end) for chunk in step.chunks]
        work += [(row, row.length - 1, row.length) for row in step.decoding]
        rows = [row for row, _, _ in work]
        assert len(set(map(id, rows))) == len(rows), "a row was given work twice"
        written = set()
        for row, start, end in work:
            assert len(row.table) == self.scheduler.pages_for(end), "pages taken too early or too late"
            for place in range(start, end):
                slot = (row.table[place // size], place % size)
                assert slot not in written, "two rows write to one place"
                written.add(slot)
                self.slots[slot] = tuple(row.ids(0, place + 1))
        for row, _, end in work:  # all is written before anything is read
            past = row.ids(0, end)
            for place in range(end):
                assert self.slots[row.table[place // size], place % size] == tuple(past[: place + 1]), "cross-talk"
        self.num_computed += step.num_tokens
        return [chunk.row for chunk in step.chunks if chunk.end == len(chunk.row.request.prompt_ids)] + step.decoding


def check(scheduler: Scheduler) -> None:
    check_pages(scheduler.pool, [row.table for row in scheduler.rows])
    missing = [scheduler.pages_for(row.request.max_cached) - len(row.table) for row in scheduler.rows]
    assert scheduler._reserved == sum(missing) <= scheduler.pool.num_available
    assert all(count >= 0 for count in missing)
    assert sum(not row.is_decoding for row in scheduler.rows) <= 1


def drain(scheduler, cache, next_token, on_step=lambda step: None, limit=10_000):
    """Run until nothing is left; the requests in the order in which they ended."""
    done = []
    for _ in range(limit):
        if not scheduler.has_work:
            return done
        step = scheduler.plan()
        assert step.num_tokens > 0, "nothing moves although there is work"
        assert step.num_tokens <= max(scheduler.max_tokens, len(step.decoding))
        assert len(scheduler.rows) <= scheduler.max_rows
        finished = []
        for row in cache.run(step):
            row.request.append(next_token(row.request), 0.0, 0.0)
            if row.request.finish_reason:
                finished.append(row)
        scheduler.finish(finished)
        done += [row.request for row in finished]
        check(scheduler)
        on_step(step)
    raise AssertionError("the schedule does not end")


prompt_parts = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4)


@settings(max_examples=1000, deadline=None)
@given(data=st.data())
def test_random_schedules_neither_leak_nor_mix_nor_stall(data):
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = random.Random(seed)
    size = data.draw(st.sampled_from([1, 2, 4, 5]))
    num_pages = data.draw(st.one_of(st.integers(1, 10), st.integers(10, 40)))
    scheduler = Scheduler(PagePool(num_pages, size), rng.randint(1, 8), rng.randint(1, 40), share_prefixes=rng.random() < 0.9)
    cache = FakeCache(scheduler)
    # Parts of a few kinds, so that prompts share beginnings of every length, end on page borders, and repeat.
    parts = {name: [rng.randrange(3) for _ in range(rng.randint(1, 9))] for name in "abcd"}
    submitted, done = [], []

    def submit():
        prompt = [token for name in data.draw(prompt_parts) for token in parts[name]]
        if submitted and rng.random() < 0.4:  # again, or a conversation that goes on
            earlier = rng.choice(submitted)
            prompt = earlier.prompt_ids + rng.choice([[], earlier.ids])
        longest = num_pages * size + 1 - len(prompt)  # fills the cache
        new = longest if longest > 0 and rng.random() < 0.2 else rng.randint(1, 12)
        request = Request(prompt, SamplingParams(new, stop_ids=(2,)))
        if scheduler.pages_for(request.max_cached) > num_pages:
            with pytest.raises(ValueError, match="cache_gib"):
                scheduler.submit(request)
        else:
            scheduler.submit(request)
            submitted.append(request)

    for _ in range(data.draw(st.integers(1, 6))):
        submit()
    accident = rng.randint(1, 60)

    def on_step(step):
        nonlocal accident
        if rng.random() < 0.3 and len(submitted) < 25:
            submit()
        accident -= 1
        if accident == 0:
            scheduler.plan()  # a pass that is interrupted: it was planned and computed nothing
            done.extend(request for request in submitted if not request.finish_reason)
            scheduler.abort()
            check(scheduler)
            submit()

    done += drain(scheduler, cache, lambda request: rng.choice((0, 0, 1, 1, 2)), on_step)
    assert scheduler.pool.num_in_use == 0 and scheduler._reserved == 0
    assert {id(request) for request in done} == {id(request) for request in submitted}
    scheduler.pool.forget_all()
    assert scheduler.pool.num_available == num_pages


def run_all(prompts, size=4, num_pages=64, new=3, max_rows=16, max_tokens=1000, share=True):
    scheduler = Scheduler(PagePool(num_pages, size), max_rows, max_tokens, share)
    cache = FakeCache(scheduler)
    for prompt in prompts:
        scheduler.submit(Request(list(prompt), SamplingParams(new)))
    drain(scheduler, cache, lambda request: 7)
    return cache.num_computed, scheduler


def test_equal_prompts_are_computed_once():
    prompt = list(range(21))
    computed, _ = run_all([prompt] * 10)
    # 21 prompt tokens once, the last one again for each of the nine others, then 2 of 3 new tokens are fed back.
    assert computed == 21 + 9 + 10 * 2
    assert run_all([prompt] * 10, share=False)[0] == 10 * (21 + 2)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9])
def test_equal_prompts_of_any_length_share_all_but_the_last_token(length):
    computed, _ = run_all([list(range(length))] * 5)
    assert computed == length + 4 + 5 * 2


def test_a_common_beginning_is_computed_once_up_to_a_whole_page():
    prompts = [[*range(10), 100 + i, 200 + i] for i in range(6)]
    computed, _ = run_all(prompts, size=4)
    assert computed == 12 + 5 * (12 - 8) + 6 * 2


def test_a_beginning_is_found_again_after_its_rows_have_gone():
    scheduler = Scheduler(PagePool(64, 4), 16, 1000)
    cache = FakeCache(scheduler)
    for _ in range(3):
        scheduler.submit(Request(list(range(20)), SamplingParams(2)))
        drain(scheduler, cache, lambda request: 7)
    assert cache.num_computed == (20 + 1) + 2 * (1 + 1)


def test_a_conversation_goes_on_where_it_was():
    scheduler = Scheduler(PagePool(64, 4), 16, 1000)
    cache = FakeCache(scheduler)
    first = Request(list(range(10)), SamplingParams(7))
    scheduler.submit(first)
    drain(scheduler, cache, lambda request: 7)
    before = cache.num_computed
    scheduler.submit(Request([*first.prompt_ids, *first.ids, 50, 51], SamplingParams(1)))
    drain(scheduler, cache, lambda request: 7)
    assert cache.num_computed - before == 10 + 7 + 2 - 16  # the last sampled token was never fed back: 16 in whole pages


def test_a_page_that_is_copied_may_be_given_away_in_the_same_step():
    scheduler = Scheduler(PagePool(4, 4), 16, 1000)
    cache = FakeCache(scheduler)
    prompt = list(range(7))
    scheduler.submit(Request(prompt, SamplingParams(1)))
    drain(scheduler, cache, lambda request: 7)
    scheduler.submit(Request(prompt, SamplingParams(1)))
    scheduler.submit(Request([100 + i for i in range(8)], SamplingParams(1)))
    drain(scheduler, cache, lambda request: 7)


def test_a_request_that_fills_the_cache_runs_again_after_its_twin():
    for _ in range(2):
        scheduler = Scheduler(PagePool(4, 4), 16, 1000)
        cache = FakeCache(scheduler)
        for _ in range(3):
            scheduler.submit(Request(list(range(7)), SamplingParams(10)))
        assert len(drain(scheduler, cache, lambda request: 7)) == 3


def test_nothing_is_found_after_the_weights_changed():
    scheduler = Scheduler(PagePool(64, 4), 16, 1000)
    cache = FakeCache(scheduler)
    for _ in range(2):
        scheduler.submit(Request(list(range(20)), SamplingParams(1)))
        drain(scheduler, cache, lambda request: 7)
        scheduler.pool.forget_all()
    assert cache.num_computed == 2 * 20


def test_what_is_kept_never_exceeds_what_was_in_use_at_once():
    scheduler = Scheduler(PagePool(1000, 4), 2, 1000)
    cache = FakeCache(scheduler)
    for i in range(50):
        scheduler.submit(Request([1000 * i + j for j in range(40)], SamplingParams(1)))
        scheduler.submit(Request([1000 * i + 500 + j for j in range(40)], SamplingParams(1)))
        drain(scheduler, cache, lambda request: 7)
    used = {page for page, _ in cache.slots}
    assert len(used) <= 2 * 2 * 10


def test_what_is_found_only_through_a_page_is_forgotten_before_it():
    pool = PagePool(4, 2)
    pages = [pool.allocate() for _ in range(3)]
    node = pool.register(0, (1, 2), pages[0])
    node = pool.register(node, (3, 4), pages[1])
    pool.register(node, (5, 6), pages[2])
    pool.release(pages)
    for expected in (pages, pages[:2], pages[:1], []):
        found = pool.match([1, 2, 3, 4, 5, 6, 7]).pages
        assert found == expected
        held = [pool.allocate() for _ in range(pool.num_available - len(found) + 1)] if found else []
        pool.release(held)  # nothing can be found in these, so they are free again


def test_a_long_prompt_does_not_hold_up_the_rows_that_decode():
    scheduler = Scheduler(PagePool(100, 4), 8, 10)
    cache = FakeCache(scheduler)
    short = Request([1, 2, 3], SamplingParams(30))
    scheduler.submit(short)
    steps = []
    scheduler.submit(Request(list(range(100, 200)), SamplingParams(1)))
    drain(scheduler, cache, lambda request: 7, lambda step: steps.append((step.num_tokens, len(short.ids))))
    assert all(tokens <= 10 for tokens, _ in steps)
    assert [count for _, count in steps[:12]] == list(range(1, 13))  # one token in every step


def test_work_waits_for_pages_and_the_order_is_kept():
    scheduler = Scheduler(PagePool(10, 4), 8, 1000)
    cache = FakeCache(scheduler)
    prompts = [[100 * i + j for j in range(20)] for i in range(6)]
    for prompt in prompts:
        scheduler.submit(Request(prompt, SamplingParams(4)))
    most = 0

    def on_step(step):
        nonlocal most
        most = max(most, len(scheduler.rows))

    done = drain(scheduler, cache, lambda request: 7, on_step)
    assert [request.prompt_ids for request in done] == prompts
    assert most <= 1  # 6 pages each, 10 in all


def test_a_request_that_can_never_fit_is_refused_with_both_sizes():
    scheduler = Scheduler(PagePool(4, 4), 8, 1000)
    with pytest.raises(ValueError, match=r"10 tokens with 8 new ones needs a cache of 20 tokens, but cache_gib allows 16"):
        scheduler.submit(Request(list(range(10)), SamplingParams(8)))
    scheduler.submit(Request(list(range(10)), SamplingParams(7)))
    with pytest.raises(ValueError, match="empty prompt"):
        scheduler.submit(Request([], SamplingParams(1)))


def test_a_double_release_is_caught():
    pool = PagePool(4, 4)
    page = pool.allocate()
    pool.release([page])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([page])


# Runs


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_runs_cover_common_beginnings_exactly_once(data):
    rng = random.Random(data.draw(st.integers(0, 2**32 - 1)))
    fresh = iter(range(10_000))
    trunks = [[next(fresh) for _ in range(rng.randint(0, 6))] for _ in range(2)]
    branches = [trunk + [next(fresh) for _ in range(rng.randint(0, 4))] for trunk in trunks for _ in range(3)]
    tables, shareable = [], []
    for _ in range(data.draw(st.integers(1, 12))):
        shared = rng.choice(trunks + branches)
        tables.append(shared + [next(fresh) for _ in range(rng.randint(1, 3))])
        shareable.append(len(tables[-1]) - 1)
    min_saved = data.draw(st.sampled_from([1, 8, 20]))
    plan = find_runs(tables, shareable, 4, min_saved)
    assert sorted(plan.order) == list(range(len(tables)))
    for place, row in enumerate(plan.order):
        mine = [page for run in plan.runs if run.first <= place < run.last for page in run.pages]
        assert mine == tables[row][: plan.covered[place]]
        assert plan.covered[place] <= shareable[row]
    for run in plan.runs:
        assert run.num_tokens == 4 * len(run.pages)
        assert run.num_tokens * (run.last - run.first - 1) >= min_saved
    if min_saved == 1:  # then every page that two rows see is in a run
        for place, row in enumerate(plan.order):
            others = {page for other in plan.order if other != row for page in tables[other]}
            assert set(tables[row][: plan.covered[place]]) == set(tables[row]) & others
