"""Sample responses with continuous batching: requests arrive at any time, and a finished row is replaced by the next request.

`step()` is one forward pass: it advances every decoding row by one token and computes a bounded number of prompt tokens in the
same pass. `generate()` completes a list of prompts; `memrl.llm` serves agents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memrl.kernels.attention import AttentionBackend, SdpaAttention
from memrl.model.hf_config import longest_text
from memrl.model.transformer import Transformer, TransformerConfig
from memrl.sampler.cuda_graphs import DecodeGraphs
from memrl.sampler.kv_cache import KVCache, StepContext, plan_decode_runs
from memrl.sampler.pages import PagePool
from memrl.sampler.sampling import RowParams, SamplingParams, sample_tokens, uniform
from memrl.sampler.scheduler import Request, Row, Scheduler
from memrl.sampler.shared_runs import RunPlan
from memrl.sampler.stop_strings import StopStrings

CPU_STEP_BYTES = 5_000_000  # size of a step's widest activations: about what the caches of a few cores hold
GPU_STEP_TOKENS = 8192
MAX_PAGES = 1 << 24  # the page pool stores Python objects for every page


@dataclass(frozen=True)
class Completion:
    """The response to one prompt.

    Attributes:
        ids: sampled token ids, including the stop token if there is one.
        logprobs: fp32 log-probability of each token under the distribution that it was drawn from: after temperature, top_k,
            top_p and min_p. For greedy tokens, that of temperature 1.
        finish_reason: "stop" or "length".
        text: the ids decoded without the stop token, cut before a stop string; "" if the sampler has no tokenizer.
        full_logprobs: log-probabilities under softmax(logits / temperature), before any filter; equal to `logprobs` if no filter
            is on.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    text: str = ""
    full_logprobs: list[float] | None = None


class Sampler:
    """Batched generation with one model and its paged key/value cache."""

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
            model: used in place; its weights may change between calls, while no request is in flight.
            tokenizer: any object with `decode(ids) -> str`, for `Completion.text` and stop strings.
            max_rows: most rows decoded together.
            max_step_tokens: most prompt and response tokens per forward pass; None chooses by model and device.
            cache_gib: size limit of the key/value cache. Requests wait for free pages; one that can never fit is an error.
            page_size: tokens per cache page; prompts share whole pages. None uses the attention backend's preference.
            share_prefixes: compute and store common prefixes of prompts once.
            attention: see `kernels.attention.pick_attention`; None uses PyTorch's own.
        """
        if max_step_tokens is None:
            max_step_tokens = step_tokens(model.config, model.dtype, model.device)
        self.attention = attention or SdpaAttention()
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
        self.window = longest_text(model.config)
        num_pages = int(cache_gib * 2**30) // (KVCache.bytes_per_token(model.config, model.dtype) * size)
        if num_pages > MAX_PAGES:
            raise ValueError(f"cache_gib {cache_gib} is {num_pages:,} pages of {size} tokens; the most is {MAX_PAGES:,}")
        self.cache = KVCache(model, num_pages, size)
        self.scheduler = Scheduler(PagePool(num_pages, size), max_rows, max_step_tokens, share_prefixes)
        self.graphs = DecodeGraphs(model, self.cache, self.attention, max_rows) if self.attention.graphable else None
        self._weights_version: int | None = None
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
            self._detect_new_weights()
        if request.params.stop:
            if self.tokenizer is None:
                raise ValueError("stop strings need a sampler with a tokenizer; give one, or stop_ids")
            request.stopper = StopStrings(self.tokenizer, request.params.stop)
        # The commands check their longest turn at the start; here no agent can pass the positions that the model is made for.
        if (tokens := len(request.prompt_ids) + request.params.max_new_tokens) > self.window:
            raise ValueError(f"prompt and response can have {tokens} tokens together, but the model's window has {self.window}")
        self.scheduler.submit(request)

    def abort(self) -> None:
        """Drop every request and free its pages."""
        self.scheduler.abort()

    def weights_changed(self) -> None:
        """Discard the cache, which other weights computed. Call after every update of the model's weights."""
        if self.has_work:
            raise RuntimeError("the weights changed while requests were in flight; finish or abort them first")
        self.scheduler.pool.forget_all()

    def release(self) -> None:
        """Free the cache's memory; only without requests in flight."""
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
            self.abort()  # the index must not contain pages that were planned but not computed
            raise

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]) -> list[Completion]:
        """Complete every prompt; results in the prompts' order.

        Args:
            prompts: token ids, any mix of lengths.
            params: one for all prompts, or one per prompt. Shared params include the seed, so equal prompts then get equal
                completions; for different ones give each prompt its own seed.
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
            self.abort()  # requests submitted before the error must not run in the next call
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
                raise RuntimeError("internal error: no waiting request can start, so page accounting is inconsistent")
            return []
        self.cache.prepare(step.new_pages, step.copies)
        if self._decode_runs is None or self._decode_runs[0] != step.decoding:
            self._decode_runs = (list(step.decoding), plan_decode_runs(step.decoding, self.cache.page_size))
        context = StepContext(self.cache, self.attention, step, self._decode_runs[1])
        indices, rows = context.sampled()
        # All host-to-device copies come before the forward pass: a later one would wait for it.
        params = self._params_of(rows) if rows else None
        num_sampled = torch.tensor([len(row.request.ids) for row in rows], device=self.model.device)
        ids = torch.tensor(context.input_ids, device=self.model.device)
        if self.graphs is not None and self.graphs.fits(context):
            logits = self.graphs.run(ids, context)
        else:
            select = None if len(indices) == len(ids) else torch.tensor(indices, dtype=torch.int64, device=self.model.device)
            logits = self.model(ids, context, select=select)
        return [] if params is None else self._sample(logits, rows, params, num_sampled)

    def _sample(self, logits: torch.Tensor, rows: list[Row], params: RowParams, num_sampled: torch.Tensor) -> list[Request]:
        sampled = sample_tokens(logits, params, uniform(params.seed, num_sampled))
        # One transfer to the host; fp64 represents token ids and fp32 values exactly.
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
            self._row_params = (list(rows), RowParams.of([row.request.params for row in rows], self.model.device))
        return self._row_params[1]

    def _detect_new_weights(self) -> None:
        """Detect in-place weight changes if `weights_changed` was not called: PyTorch counts a tensor's in-place changes."""
        version = sum(p._version for p in self.model.parameters() if not p.is_inference())  # inference tensors have no count
        if version != self._weights_version:
            self._weights_version = version
            self.scheduler.pool.forget_all()


def step_tokens(config: TransformerConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Default tokens per step; on a CPU chosen so that the widest activations fit into its caches."""
    if device.type != "cpu":
        return GPU_STEP_TOKENS
    fitting = CPU_STEP_BYTES // (config.intermediate_size * dtype.itemsize)
    return min(max(64, fitting // 64 * 64), 16384)
