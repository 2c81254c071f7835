"""Decide which tokens the next forward pass computes: continuous batching with chunked prefill, without tensors.

Every step advances all decoding rows by one token, and spends the rest of the token budget on prompts: first on the partly
computed one, then on waiting ones, oldest first. A request is admitted when all pages that it can ever need are available, so a
running row never lacks a page and is never preempted.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from memrl.sampler.pages import ROOT, Match, PagePool
from memrl.sampler.sampling import SamplingParams
from memrl.sampler.stop_strings import StopStrings


@dataclass(eq=False)
class Request:
    """A prompt and its response so far.

    Attributes:
        tag: any object of the caller; the sampler ignores it.
        ids, logprobs, full_logprobs, finish_reason: the response so far; see `Completion`.
    """

    prompt_ids: list[int]
    params: SamplingParams
    tag: Any = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    full_logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    stopper: StopStrings | None = None

    def append(self, token: int, logprob: float, full_logprob: float) -> None:
        """Append a sampled token; sets `finish_reason` if it is the last."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.full_logprobs.append(full_logprob)
        if token in self.params.stop_ids or (self.stopper is not None and self.stopper.push(token)):
            self.finish_reason = "stop"
        elif len(self.ids) == self.params.max_new_tokens:
            self.finish_reason = "length"

    @property
    def content_ids(self) -> list[int]:
        """The response without a stop token."""
        return self.ids[:-1] if self.ids and self.ids[-1] in self.params.stop_ids else self.ids

    @property
    def max_cached(self) -> int:
        """Most tokens that the cache has to hold; the last sampled token is never fed back."""
        return len(self.prompt_ids) + self.params.max_new_tokens - 1


@dataclass(eq=False)
class Row:
    """A request that holds pages.

    Attributes:
        table: its pages, in token order.
        length: number of tokens in the cache, including the step that is being planned.
        prefix_ids: ids in the pool's index of the prefixes that consist of its first 0, 1, 2, ... full pages.
    """

    request: Request
    table: list[int]
    length: int
    prefix_ids: list[int]

    @property
    def is_decoding(self) -> bool:
        return self.length >= len(self.request.prompt_ids)

    def ids(self, start: int, end: int) -> list[int]:
        """Token ids at positions start .. end-1, prompt and response."""
        prompt = self.request.prompt_ids
        if end <= len(prompt):
            return prompt[start:end]
        return prompt[start:] + self.request.ids[max(0, start - len(prompt)) : end - len(prompt)]


@dataclass
class Chunk:
    """Prompt tokens start .. end-1 of a row, to be computed in this step."""

    row: Row
    start: int
    end: int


@dataclass
class Step:
    """One forward pass.

    Attributes:
        chunks: prompt tokens; the row's earlier tokens are in the cache.
        decoding: rows with one token each, at position `length - 1`; also prompts of which only the last token is left.
        new_pages: pages allocated in this step, with arbitrary content.
        copies: (source, target) pages to copy before the forward pass.
    """

    chunks: list[Chunk] = field(default_factory=list)
    decoding: list[Row] = field(default_factory=list)
    new_pages: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.decoding) + sum(chunk.end - chunk.start for chunk in self.chunks)


class Scheduler:
    """The queue of requests and the rows that hold pages."""

    def __init__(self, pool: PagePool, max_rows: int, max_tokens: int, share_prefixes: bool = True):
        """At most `max_rows` rows hold pages at a time; the token budget of a step never holds decoding rows back."""
        self.pool, self.max_rows, self.max_tokens, self.share_prefixes = pool, max_rows, max_tokens, share_prefixes
        self.waiting: deque[Request] = deque()
        self.rows: list[Row] = []  # in order of admission; only the last one can have prompt tokens left
        self._reserved = 0  # pages that the rows may still allocate
        self._new_tails: set[int] = set()  # last pages of prompts that the step being planned completes; to copy in the next step

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.rows)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.page_size)

    def submit(self, request: Request) -> None:
        """Append a request to the queue; ValueError if it can never run."""
        if not request.prompt_ids:
            raise ValueError("an empty prompt cannot be completed; give at least one token")
        if self.pages_for(request.max_cached) > self.pool.num_pages:
            raise ValueError(
                f"a prompt of {len(request.prompt_ids)} tokens with {request.params.max_new_tokens} new ones needs a cache of "
                f"{self.pages_for(request.max_cached) * self.pool.page_size} tokens, but cache_gib allows "
                f"{self.pool.num_pages * self.pool.page_size}; raise cache_gib or shorten the prompt"
            )
        self.waiting.append(request)

    def plan(self) -> Step:
        """The next step. The rows' lengths and the index are updated as if it had been computed already."""
        step = Step()
        self._new_tails.clear()
        for row in self.rows:
            if row.is_decoding:
                self._extend(row, row.length + 1, step)
                step.decoding.append(row)
        budget = max(self.max_tokens - len(step.decoding), 0)
        for row in self.rows:
            if not row.is_decoding:
                budget -= self._prefill(row, budget, step)
        self._admit(budget, step)
        return step

    def finish(self, rows: Iterable[Row]) -> None:
        """Remove rows whose requests are complete."""
        finished = set(map(id, rows))
        for row in self.rows:
            if id(row) in finished:
                self.pool.release(row.table)
                self._reserved -= self._missing(row.request, row.table)
        self.rows = [row for row in self.rows if id(row) not in finished]

    def abort(self) -> None:
        """Drop every request and all cached content: an interrupted step computed nothing.

        The page pool is rebuilt instead of rolled back, because an interruption can leave it half updated.
        """
        self.waiting.clear()
        self.rows = []
        self._reserved = 0
        self.pool = PagePool(self.pool.num_pages, self.pool.page_size)

    def _admit(self, budget: int, step: Step) -> None:
        skipped: list[Request] = []
        while self.waiting and budget > 0 and len(self.rows) < self.max_rows:
            request = self.waiting.popleft()
            match = self.pool.match(request.prompt_ids) if self.share_prefixes else Match([], [ROOT])
            if match.tail_page in self._new_tails:
                skipped.append(request)  # this step computes an equal prompt: wait one step to copy all but the last token
                continue
            if match.tail_page is not None and not self._fits(request, match):
                match = Match(match.pages, match.prefix_ids)  # without the copy: both pages together do not fit
            if not self._fits(request, match):
                self.waiting.appendleft(request)
                break
            budget -= self._start(request, match, budget, step)
        self.waiting.extendleft(reversed(skipped))

    def _fits(self, request: Request, match: Match) -> bool:
        """Whether all pages that the request can ever need, besides the shared ones, are available."""
        shared = [*match.pages, *([] if match.tail_page is None else [match.tail_page])]
        num_cached = sum(map(self.pool.is_cached, shared))
        return self._missing(request, match.pages) <= self.pool.num_available - self._reserved - num_cached

    def _missing(self, request: Request, pages: list[int]) -> int:
        """How many pages a request may need besides those that it has."""
        return self.pages_for(request.max_cached) - len(pages)

    def _start(self, request: Request, match: Match, budget: int, step: Step) -> int:
        """Admit a request and plan its first tokens; returns how much of the token budget they use."""
        self.pool.share(match.pages)
        self._reserved += self._missing(request, match.pages)
        row = Row(request, match.pages, len(match.pages) * self.pool.page_size, match.prefix_ids)
        self.rows.append(row)
        if match.tail_page is not None:
            row.length = len(request.prompt_ids) - 1
            self.pool.share([match.tail_page])  # it must not be evicted before it is copied
            self._allocate(row, step)
            self.pool.release([match.tail_page])
            step.copies.append((match.tail_page, row.table[-1]))
        return self._prefill(row, budget, step)

    def _prefill(self, row: Row, budget: int, step: Step) -> int:
        """Plan prompt tokens of a row, at most `budget`; returns their number."""
        prompt_ids = row.request.prompt_ids
        start, end = row.length, min(len(prompt_ids), row.length + budget)
        if start == end:
            return 0
        self._extend(row, end, step)
        if end - start == 1 and end == len(prompt_ids):
            step.decoding.append(row)
        else:
            step.chunks.append(Chunk(row, start, end))
        if end == len(prompt_ids) and self.share_prefixes:
            # Later requests with the same prompt can reuse all but its last token.
            num_full = (end - 1) // self.pool.page_size
            tail = tuple(prompt_ids[num_full * self.pool.page_size : end - 1])
            if tail:
                self.pool.register(row.prefix_ids[num_full], tail, row.table[num_full])
                self._new_tails.add(row.table[num_full])
        return end - start

    def _extend(self, row: Row, length: int, step: Step) -> None:
        """Allocate pages for a row's first `length` tokens, and register the pages that they fill."""
        while len(row.table) * self.pool.page_size < length:
            self._allocate(row, step)
        row.length = length
        size = self.pool.page_size
        while self.share_prefixes and len(row.prefix_ids) * size <= length:
            index = len(row.prefix_ids) - 1
            ids = tuple(row.ids(index * size, (index + 1) * size))
            row.prefix_ids.append(self.pool.register(row.prefix_ids[-1], ids, row.table[index]))

    def _allocate(self, row: Row, step: Step) -> None:
        row.table.append(self.pool.allocate())
        step.new_pages.append(row.table[-1])
        self._reserved -= 1
