"""Continuous batching: requests come at any time, and a finished row's place goes to the next one.

`step()` admits what fits (one packed prefill) and then advances every active row by one token. `generate()` is the simple front
for a list of prompts; `memrl.llm` is the front for agents.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memrl.model.transformer import Transformer
from memrl.sampler.kv_cache import DecodeContext, KVCache, PrefillContext
from memrl.sampler.sampling import SamplingParams, sample_tokens, uniform


@dataclass(frozen=True)
class Completion:
    """What came back for one prompt.

    Attributes:
        ids: sampled token ids, the stop token included when there is one.
        logprobs: fp32 log-probability of each under softmax(logits / temperature).
        finish_reason: "stop" or "length".
        text: the ids decoded without the stop token; "" when the sampler has no tokenizer.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    text: str = ""


@dataclass(eq=False)
class Request:
    """A prompt on its way through the sampler; `tag` is the caller's own and is never looked at."""

    prompt_ids: list[int]
    params: SamplingParams
    tag: Any = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def max_len(self) -> int:
        # The last sampled token is never fed back, so it needs no place in the cache.
        return KVCache.round_up(len(self.prompt_ids) + self.params.max_new_tokens - 1)


class Sampler:
    def __init__(
        self,
        model: Transformer,
        tokenizer=None,
        *,
        max_rows: int = 256,
        max_prefill_tokens: int = 16384,
        cache_gib: float = 4.0,
    ):
        """
        Args:
            model: sampled from in place; its weights may change between calls, while no request is in flight.
            tokenizer: anything with `decode(ids) -> str`; only for `Completion.text`.
            max_rows: rows decoded together.
            max_prefill_tokens: prompt tokens of one admission; a single longer prompt is admitted alone.
            cache_gib: bound on the key/value cache. Requests wait for room; one that can never fit is an error.
        """
        if max_rows < 1 or max_prefill_tokens < 1:
            raise ValueError(f"max_rows ({max_rows}) and max_prefill_tokens ({max_prefill_tokens}) must be at least 1")
        self.model, self.tokenizer = model, tokenizer
        self.max_rows, self.max_prefill_tokens = max_rows, max_prefill_tokens
        self.cache = KVCache(model)
        self.cache_tokens = int(cache_gib * 2**30) // KVCache.bytes_per_token(model.config, model.dtype)
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []  # in the order of the cache's places
        self._row_params: dict[str, Tensor] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.active)

    def submit(self, request: Request) -> None:
        if not request.prompt_ids:
            raise ValueError("an empty prompt has no next token; give at least one token")
        if request.max_len > self.cache_tokens:
            raise ValueError(
                f"a prompt of {len(request.prompt_ids)} tokens with {request.params.max_new_tokens} new ones needs a cache of "
                f"{request.max_len} tokens, but cache_gib allows {self.cache_tokens}; raise cache_gib or shorten the prompt"
            )
        self.waiting.append(request)

    def abort(self) -> None:
        """Forget every request; their places are free again."""
        self.waiting.clear()
        self.active.clear()
        self.cache.lengths.clear()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Admit what fits, advance every active row by one token, and return the requests that this finished."""
        finished = []
        admitted = self._admit()
        if admitted:
            finished += self._prefill(admitted)
        if self.active:
            context = DecodeContext(self.cache)
            last = torch.tensor([request.ids[-1] for request in self.active], device=self.model.device)
            finished += self._advance(self.model(last, context), context.positions, first=0)
        return finished

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Complete every prompt; results in the prompts' order.

        Args:
            prompts: token ids, any mix of lengths.
            params: one for all prompts, or one per prompt. Prompts that share params share its seed too, so equal prompts
                then get equal completions: give each its own seed where that is not wanted.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts came with {len(each)} SamplingParams; give one, or one per prompt")
        requests = [Request(list(prompt), p) for prompt, p in zip(prompts, each, strict=True)]
        try:
            for request in requests:
                self.submit(request)
            while self.has_work:
                self.step()
        except BaseException:
            self.abort()  # what a refused prompt or an interruption left behind must not run in the next call
            raise
        return [self.completion(request) for request in requests]

    def completion(self, request: Request) -> Completion:
        content = request.ids[:-1] if request.finish_reason == "stop" else request.ids
        text = self.tokenizer.decode(content) if self.tokenizer is not None else ""
        return Completion(request.ids, request.logprobs, request.finish_reason, text)

    def _admit(self) -> list[Request]:
        """Take waiting requests, oldest first, while rows, cache and the prefill budget have room; sorted by length."""
        admitted: list[Request] = []
        num_tokens = 0
        max_len = max((request.max_len for request in self.active), default=0)
        while self.waiting:
            request = self.waiting[0]
            rows = len(self.active) + len(admitted) + 1
            longest = max(max_len, request.max_len)
            num_tokens += len(request.prompt_ids)
            no_room = rows > self.max_rows or rows * longest > self.cache_tokens
            if no_room or (admitted and num_tokens > self.max_prefill_tokens):
                break
            max_len = longest
            admitted.append(self.waiting.popleft())
        if admitted:
            rows = len(self.active) + len(admitted)
            places = min(self.max_rows, self.cache_tokens // max_len, 1 << (rows - 1).bit_length())
            self.cache.reserve(max(rows, places), max_len)
        return sorted(admitted, key=lambda request: len(request.prompt_ids))  # equal lengths share an attention call

    def _prefill(self, admitted: list[Request]) -> list[Request]:
        seq_lens = [len(request.prompt_ids) for request in admitted]
        context = PrefillContext(self.cache, seq_lens)
        device = self.model.device
        ids = torch.tensor([token for request in admitted for token in request.prompt_ids], device=device)
        ends = torch.tensor(seq_lens, device=device).cumsum(0) - 1
        logits = self.model(ids, context, select=ends)
        first = len(self.active)
        self.active += admitted
        self._load_row_params()
        return self._advance(logits, context.positions[ends], first)

    def _advance(self, logits: Tensor, positions: Tensor, first: int) -> list[Request]:
        """Sample a token for the rows from place `first` on, whose last tokens stand at `positions`; remove finished rows."""
        rows = {name: values[first:] for name, values in self._row_params.items()}
        ids, logprobs = sample_tokens(
            logits,
            rows["temperature"],
            rows["top_p"],
            rows["top_k"],
            uniform(rows["seed"], positions - rows["prompt_len"] + 1),
            truncated=any(r.params.top_p < 1 or r.params.top_k for r in self.active[first:]),
        )
        finished = []
        for request, token, logprob in zip(self.active[first:], ids.tolist(), logprobs.tolist(), strict=True):
            request.ids.append(token)
            request.logprobs.append(logprob)
            if token in request.params.stop_ids:
                request.finish_reason = "stop"
            elif len(request.ids) == request.params.max_new_tokens:
                request.finish_reason = "length"
            if request.finish_reason:
                finished.append(request)
        self._remove(finished)
        return finished

    def _remove(self, finished: list[Request]) -> None:
        for request in finished:
            place = self.active.index(request)
            self.cache.remove(place)
            last = self.active.pop()
            if last is not request:
                self.active[place] = last
        if finished:
            self._load_row_params()

    def _load_row_params(self) -> None:
        params = [request.params for request in self.active]
        device = self.model.device
        self._row_params = {
            "temperature": torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            "top_p": torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
            "top_k": torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
            "seed": torch.tensor([p.seed for p in params], dtype=torch.int64, device=device),
            "prompt_len": torch.tensor([len(r.prompt_ids) for r in self.active], dtype=torch.int64, device=device),
        }
