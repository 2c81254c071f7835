"""Continuous batching: requests come at any time, and a finished row's place goes to the next one.

`step()` is one forward pass: it advances every decoding row by one token and computes a bounded number of prompt tokens beside
them. `generate()` is the simple front for a list of prompts; `memrl.llm` is the front for agents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memrl.kernels.attention import AttentionBackend
from memrl.model.attention_context import default_attention
from memrl.model.transformer import Transformer, TransformerConfig
from memrl.sampler.cuda_graphs import DecodeGraphs
from memrl.sampler.kv_cache import KVCache, StepContext, plan_decode_runs
from memrl.sampler.pages import PagePool
from memrl.sampler.sampling import RowParams, SamplingParams, sample_tokens, uniform
from memrl.sampler.scheduler import Request, Row, Scheduler
from memrl.sampler.shared_runs import RunPlan
from memrl.sampler.stop_strings import StopStrings

CPU_STEP_BYTES = 5_000_000  # of the widest activations of a step: about what the caches of a few cores hold
GPU_STEP_TOKENS = 8192
MAX_PAGES = 1 << 24  # what the books hold of each page is Python objects


@dataclass(frozen=True)
class Completion:
    """What came back for one prompt.

    Attributes:
        ids: sampled token ids, the stop token included when there is one.
        logprobs: fp32 log-probability of each under the distribution that it was drawn from: after temperature, top_k, top_p and
            min_p. A greedy token's is that of temperature 1.
        finish_reason: "stop" or "length".
        text: the ids decoded without the stop token and without what follows a stop string; "" when the sampler has no tokenizer.
        full_logprobs: under softmax(logits / temperature), whatever was cut off; equal to `logprobs` where nothing was.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    text: str = ""
    full_logprobs: list[float] | None = None


class Sampler:
    def __init__(
        self,
        model: Transformer,
        tokenizer=None,
        *,
        max_rows: int = 256,
        max_step_tokens: int | None = None,
        cache_gib: float = 4.0,
        page_size: int | None = None,
        share_prefixes: bool = True,
        attention: AttentionBackend | None = None,
    ):
        """
        Args:
            model: sampled from in place; its weights may change between calls, while no request is in flight.
            tokenizer: anything with `decode(ids) -> str`; for `Completion.text` and stop strings.
            max_rows: rows decoded together.
            max_step_tokens: prompt and response tokens of one forward pass; None fits the model and the device.
            cache_gib: bound on the key/value cache. Requests wait for room; one that can never fit is an error.
            page_size: tokens of a page of the cache; prompts share whole pages. None takes the attention backend's choice.
            share_prefixes: compute and keep what prompts have in common once.
            attention: see `kernels.pick_attention`; None is PyTorch's own.
        """
        if max_step_tokens is None:
            max_step_tokens = step_tokens(model.config, model.dtype, model.device)
        self.attention = attention or default_attention(model.device)
        size = page_size or self.attention.preferred_page_size
        if max_rows < 1 or max_step_tokens < 1 or size < 1:
            raise ValueError(
                f"max_rows ({max_rows}), max_step_tokens ({max_step_tokens}) and page_size ({size}) must be at least 1"
            )
        if size % self.attention.page_size_multiple:
            raise ValueError(
                f"page_size is {size}; {self.attention.name} attention needs a multiple of {self.attention.page_size_multiple}"
            )
        self.model, self.tokenizer, self.max_rows = model, tokenizer, max_rows
        num_pages = int(cache_gib * 2**30) // (KVCache.bytes_per_token(model.config, model.dtype) * size)
        if num_pages > MAX_PAGES:
            raise ValueError(f"cache_gib is {cache_gib}, or {num_pages:,} pages of {size} tokens; at most {MAX_PAGES:,} work")
        self.cache = KVCache(model, num_pages, size)
        self.scheduler = Scheduler(PagePool(num_pages, size), max_rows, max_step_tokens, share_prefixes)
        self.graphs = DecodeGraphs(model, self.cache, self.attention, max_rows) if self.attention.graphable else None
        self._weights: int | None = None
        self._row_params: tuple[list[Row], RowParams] | None = None
        self._decode_runs: tuple[list[Row], RunPlan] | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def cache_tokens(self) -> int:
        return self.cache.num_pages * self.cache.page_size

    def submit(self, request: Request) -> None:
        if not self.has_work:
            self._notice_new_weights()
        if request.params.stop:
            if self.tokenizer is None:
                raise ValueError("stop strings need a sampler with a tokenizer; give one, or stop_ids")
            request.stopper = StopStrings(self.tokenizer, request.params.stop)
        self.scheduler.submit(request)

    def abort(self) -> None:
        """Forget every request; their pages are free again."""
        self.scheduler.abort()

    def weights_changed(self) -> None:
        """What is in the cache was computed by other weights: forget it. Call after every update of the model's weights."""
        if self.has_work:
            raise RuntimeError("the weights changed while requests were in flight; wait for them or abort them first")
        self.scheduler.pool.forget_all()

    def release(self) -> None:
        """Give the cache's memory back; there must be no requests."""
        assert not self.has_work, "requests are still in flight"
        self.scheduler.pool.forget_all()
        self.cache.release()
        if self.graphs is not None:
            self.graphs.clear()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One forward pass; returns the requests that it finished."""
        try:
            return self._step()
        except BaseException:
            self.abort()  # pages that were planned but not computed must not be found by anybody
            raise

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]) -> list[Completion]:
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
        text = ""
        if request.stopper is not None:
            text = request.stopper.text(request.content_ids)
        elif self.tokenizer is not None:
            text = self.tokenizer.decode(request.content_ids)
        return Completion(request.ids, request.logprobs, request.finish_reason, text, request.full_logprobs)

    def _step(self) -> list[Request]:
        step = self.scheduler.plan()
        if not step.num_tokens:
            if self.has_work:
                raise RuntimeError("requests wait and none of them can start: the page books are wrong, please report this")
            return []
        self.cache.prepare(step.fresh, step.copies)
        if self._decode_runs is None or self._decode_runs[0] != step.decoding:
            self._decode_runs = (list(step.decoding), plan_decode_runs(step.decoding, self.cache.page_size))
        context = StepContext(self.cache, self.attention, step, self._decode_runs[1])
        places, rows = context.sampled()
        # All that the host sends goes before the forward pass: a copy behind it would wait for it.
        params = self._params_of(rows) if rows else None
        num_sampled = torch.tensor([len(row.request.ids) for row in rows], device=self.model.device)
        ids = torch.tensor(context.input_ids, device=self.model.device)
        if self.graphs is not None and self.graphs.fits(context):
            logits = self.graphs.run(ids, context)
        else:
            select = None if len(places) == len(ids) else torch.tensor(places, dtype=torch.int64, device=self.model.device)
            logits = self.model(ids, context, select=select)
        return self._sample(logits, rows, params, num_sampled) if rows else []

    def _sample(self, logits: torch.Tensor, rows: list[Row], params: RowParams, num_sampled: torch.Tensor) -> list[Request]:
        sampled = sample_tokens(logits, params, uniform(params.seed, num_sampled))
        # One transfer, one wait; fp64 holds token ids and fp32 values alike.
        values = torch.stack([sampled.ids.double(), sampled.logprobs.double(), sampled.full_logprobs.double()]).tolist()
        finished = []
        for row, token, logprob, full in zip(rows, *values, strict=True):
            request = row.request
            request.append(int(token), logprob, full)
            if request.finish_reason:
                finished.append(row)
        if finished:
            self.scheduler.finish(finished)
        return [row.request for row in finished]

    def _params_of(self, rows: list[Row]) -> RowParams:
        if self._row_params is None or self._row_params[0] != rows:
            params = [row.request.params for row in rows]
            lens = [len(row.request.prompt_ids) for row in rows]
            self._row_params = (list(rows), RowParams.of(params, lens, self.model.device))
        return self._row_params[1]

    def _notice_new_weights(self) -> None:
        """A safety net for who forgets `weights_changed`: PyTorch counts the changes made to a tensor in place."""
        version = sum(p._version for p in self.model.parameters() if not p.is_inference())  # those are not counted
        if version != self._weights:
            self._weights = version
            self.scheduler.pool.forget_all()


def step_tokens(config: TransformerConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens of a step: on a CPU so many that the widest activations stay in its caches."""
    if device.type != "cpu":
        return GPU_STEP_TOKENS
    fitting = CPU_STEP_BYTES // (config.intermediate_size * dtype.itemsize)
    return min(max(64, fitting // 64 * 64), 16384)
