"""Which tokens the next forward pass computes: continuous batching with chunked prefill, decided without a tensor.

Every step advances all rows that are decoding by one token, and spends what is left of the token budget on prompts: first on the
one that is half done, then on waiting ones, oldest first. A request is admitted when the pages that it can ever need are free,
so a row that runs is never short of room and nothing has to be thrown out.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from memrl.sampler.pages import ROOT, Key, Match, PagePool
from memrl.sampler.sampling import SamplingParams
from memrl.sampler.stop_strings import StopStrings


@dataclass(eq=False)
class Request:
    """A prompt on its way through the sampler; `tag` is the caller's own and is never looked at.

    Attributes:
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
        """Take in a sampled token; sets `finish_reason` where it is the last."""
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
        """Tokens that the cache must hold at most; the last sampled one is never fed back."""
        return len(self.prompt_ids) + self.params.max_new_tokens - 1


@dataclass(eq=False)
class Row:
    """A request that has pages.

    Attributes:
        table: its pages, in the order of its tokens.
        length: tokens in the cache, those of the step that is being planned included.
        reserved: pages that it may still take.
        node, previous_node: identities of the last two full pages that can be found, of `num_registered`.
    """

    request: Request
    table: list[int]
    length: int
    reserved: int
    node: int
    num_registered: int
    previous_node: int = ROOT

    @property
    def is_decoding(self) -> bool:
        return self.length >= len(self.request.prompt_ids)

    def ids(self, start: int, end: int) -> list[int]:
        """Token ids of its places start .. end-1, prompt and response."""
        prompt = self.request.prompt_ids
        if end <= len(prompt):
            return prompt[start:end]
        return prompt[start:] + self.request.ids[max(0, start - len(prompt)) : end - len(prompt)]


@dataclass
class Chunk:
    """Tokens start .. end-1 of a row, to be computed in this step."""

    row: Row
    start: int
    end: int


@dataclass
class Step:
    """One forward pass.

    Attributes:
        chunks: prompt tokens; a row's earlier ones are in the cache.
        decoding: one token each, at place `length - 1`; the last token of a prompt whose other tokens are cached counts as one.
        fresh: pages that were just taken and hold nothing yet.
        copies: (from, to) pages to be copied before the pass.
    """

    chunks: list[Chunk] = field(default_factory=list)
    decoding: list[Row] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.decoding) + sum(chunk.end - chunk.start for chunk in self.chunks)


class Scheduler:
    def __init__(self, pool: PagePool, max_rows: int, max_tokens: int, share_prefixes: bool = True):
        """
        Args:
            max_rows: rows that hold pages at the same time.
            max_tokens: tokens of a step; rows that decode go through even if they are more.
            share_prefixes: look for beginnings that are in the cache.
        """
        self.pool, self.max_rows, self.max_tokens, self.share_prefixes = pool, max_rows, max_tokens, share_prefixes
        self.waiting: deque[Request] = deque()
        self.rows: list[Row] = []  # in order of admission; at most one of them, the last, has prompt tokens left
        self._reserved = 0
        self._fresh_tails: set[Key] = set()  # tails that the step being planned computes: to be copied in the next one

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.rows)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.page_size)

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue; ValueError for one that can never run."""
        if not request.prompt_ids:
            raise ValueError("an empty prompt has no next token; give at least one token")
        if self.pages_for(request.max_cached) > self.pool.num_pages:
            raise ValueError(
                f"a prompt of {len(request.prompt_ids)} tokens with {request.params.max_new_tokens} new ones needs a cache of "
                f"{self.pages_for(request.max_cached) * self.pool.page_size} tokens, but cache_gib allows "
                f"{self.pool.num_pages * self.pool.page_size}; raise cache_gib or shorten the prompt"
            )
        self.waiting.append(request)

    def plan(self) -> Step:
        """The next step's work. It counts as done: what it computes is in the rows' lengths and in the index."""
        step = Step()
        self._fresh_tails.clear()
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
        """Let go of rows whose requests have ended."""
        leaving = set(map(id, rows))
        for row in self.rows:
            if id(row) in leaving:
                self.pool.release(row.table)
                self._reserved -= row.reserved
        self.rows = [row for row in self.rows if id(row) not in leaving]

    def abort(self) -> None:
        """Forget every request and everything that the cache holds: a step that was cut off computed nothing.

        The books are made anew, not undone, because an interruption may have come between two of their lines.
        """
        self.waiting.clear()
        self.rows = []
        self._reserved = 0
        self.pool = PagePool(self.pool.num_pages, self.pool.page_size)

    def _admit(self, budget: int, step: Step) -> None:
        skipped: list[Request] = []
        while self.waiting and budget > 0 and len(self.rows) < self.max_rows:
            request = self.waiting.popleft()
            match = self.pool.match(request.prompt_ids) if self.share_prefixes else Match([], ROOT)
            if match.tail_key in self._fresh_tails:
                skipped.append(request)  # its twin is being computed: in the next step all but the last token is there
                continue
            if match.tail_page is not None and not self._fits(request, match):
                match = Match(match.pages, match.node)  # the page to copy from takes room besides the copy
            if not self._fits(request, match):
                self.waiting.appendleft(request)
                break
            budget -= self._start(request, match, budget, step)
        self.waiting.extendleft(reversed(skipped))

    def _fits(self, request: Request, match: Match) -> bool:
        """Whether all the pages that the request can ever need are free, besides those that it shares."""
        found = [*match.pages, *([] if match.tail_page is None else [match.tail_page])]
        taken = sum(map(self.pool.is_kept, found))
        return self._needed(request, match) <= self.pool.num_available - self._reserved - taken

    def _needed(self, request: Request, match: Match) -> int:
        return self.pages_for(request.max_cached) - len(match.pages)

    def _start(self, request: Request, match: Match, budget: int, step: Step) -> int:
        """Give a request its pages and its first tokens' work; returns how many tokens that takes of the budget."""
        needed = self._needed(request, match)
        self.pool.share(match.pages)
        self._reserved += needed
        length = match.num_tokens(self.pool.page_size)
        row = Row(request, list(match.pages), length, needed, match.node, len(match.pages))
        self.rows.append(row)
        if match.tail_page is not None:
            self.pool.share([match.tail_page])  # it must not be given away before it was copied
            self._take_page(row, step)
            self.pool.release([match.tail_page])
            step.copies.append((match.tail_page, row.table[-1]))
        return self._prefill(row, budget, step)

    def _prefill(self, row: Row, budget: int, step: Step) -> int:
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
            # Whoever comes with the same prompt needs everything but its last token.
            before = (end - 1) // self.pool.page_size
            tail = tuple(prompt_ids[before * self.pool.page_size : end - 1])
            if tail:
                node = row.node if before == row.num_registered else row.previous_node
                key = self.pool.register_tail(node, tail, row.table[before])
                if key is not None:
                    self._fresh_tails.add(key)
        return end - start

    def _extend(self, row: Row, length: int, step: Step) -> None:
        """Make room for a row's first `length` tokens, and let the pages that they fill be found."""
        while len(row.table) * self.pool.page_size < length:
            self._take_page(row, step)
        row.length = length
        size = self.pool.page_size
        while self.share_prefixes and (row.num_registered + 1) * size <= length:
            first = row.num_registered * size
            row.previous_node = row.node
            row.node = self.pool.register(row.node, tuple(row.ids(first, first + size)), row.table[row.num_registered])
            row.num_registered += 1

    def _take_page(self, row: Row, step: Step) -> None:
        row.table.append(self.pool.allocate())
        step.fresh.append(row.table[-1])
        row.reserved -= 1
        self._reserved -= 1
