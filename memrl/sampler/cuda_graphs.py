"""Decoding under CUDA graphs: a step of a small model is launch-bound, and a graph launches all its kernels at once.

A graph replays fixed addresses and shapes, so there is one for every bucket of rows (1, 2, 4, 8, ...) and width of the page table
(a power of two too): rows come and go and lengths grow without anything being captured or compiled again, beyond a handful of
buckets. Rows that a bucket has too many read and write a page that belongs to nobody.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from memrl.kernels.attention import AttentionBackend
from memrl.model.transformer import Transformer
from memrl.sampler.kv_cache import KVCache, StepContext

Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


def capture_cuda(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Record what `function` launches; the result launches it again, with the same inputs and output in the same places."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # kernels that set themselves up at their first call must not do so in the recording
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


class DecodeGraphs:
    """Steps in which all rows decode and no pages are read in common."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        attention: AttentionBackend,
        max_rows: int,
        capture: Capture | None = None,
    ):
        self.model, self.cache, self.attention, self.max_rows = model, cache, attention, max_rows
        self._capture = capture or (capture_cuda if model.device.type == "cuda" else None)
        self._buckets: dict[tuple[int, int], _Bucket] = {}

    def fits(self, context: StepContext) -> bool:
        # Layers that are spread out move weights in every call, which a graph cannot hold.
        in_place = self.model.placement is None
        return self._capture is not None and in_place and context.num_chunk_tokens == 0 and not context.runs

    def run(self, ids: Tensor, context: StepContext) -> Tensor:
        """Logits [rows, V] of a step that `fits`; valid until the next call."""
        plan = context.plans(self.model.device).pages
        shape = (min(_power_of_two(len(ids)), max(self.max_rows, len(ids))), _power_of_two(plan.pages.shape[1]))
        bucket = self._buckets.get(shape)
        if bucket is None:
            bucket = _Bucket(self.model, self.cache, self.attention, plan, shape)
            with torch.cuda.device(self.model.device) if self.model.device.type == "cuda" else nullcontext():
                bucket.replay = self._capture(bucket.forward)
            self._buckets[shape] = bucket
        bucket.load(ids, context)
        return bucket.replay()[: len(ids)]

    def clear(self) -> None:
        """Forget all graphs: the cache that they point into is gone."""
        self._buckets.clear()


class _Bucket:
    """The inputs of one graph, at fixed addresses. It is also the attention context of its forward pass."""

    replay: Callable[[], Tensor]

    def __init__(self, model: Transformer, cache: KVCache, attention: AttentionBackend, plan, shape: tuple[int, int]):
        self.model, self.cache, self.attention = model, cache, attention
        rows, width = shape
        self.ids = torch.zeros(rows, dtype=torch.int64, device=model.device)
        self.positions = torch.zeros_like(self.ids)
        self.slots = torch.full_like(self.ids, cache.scratch_page * cache.page_size)
        table = torch.full((rows, width), cache.scratch_page, dtype=plan.pages.dtype, device=model.device)
        self.page_plan = plan._replace(pages=table, lengths=plan.lengths.new_ones(rows))

    def load(self, ids: Tensor, context: StepContext) -> None:
        num_rows, scratch = len(ids), self.cache.scratch_page
        given = context.plans(ids.device)
        held, plan = self.page_plan, given.pages
        for mine, values, empty in (
            (self.ids, ids, 0),
            (self.positions, context.positions, 0),
            (self.slots, given.slots, scratch * self.cache.page_size),
            (held.lengths, plan.lengths, 1),
        ):
            mine[:num_rows] = values
            mine[num_rows:] = empty
        held.pages[:num_rows, : plan.pages.shape[1]] = plan.pages
        held.pages[num_rows:] = scratch

    def forward(self) -> Tensor:
        return self.model(self.ids, self)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.slots, k, v)
        return self.attention.pages(q, self.cache.k[layer], self.cache.v[layer], self.page_plan)[0]


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
