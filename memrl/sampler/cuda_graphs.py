"""Run decoding steps as CUDA graphs: a small model's step is limited by kernel launches, and a graph launches all at once.

A graph has fixed addresses and shapes, so there is one per bucket: number of rows and width of the page table, both rounded up
to powers of two. Requests come and go and lengths grow without new captures, apart from a few buckets. A bucket's surplus rows
read and write a scratch page.
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
    """Capture the kernels that `function` launches; the result replays them on the same input and output memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # warm up: a kernel's one-time setup must not be captured
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
    """Graphs for steps in which all rows decode and no shared pages are read separately."""

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
        # Layers spread over devices may move weights in every call, which a graph cannot capture.
        in_place = self.model.placement is None
        return self._capture is not None and in_place and context.num_chunk_tokens == 0 and not context.runs

    def run(self, ids: Tensor, context: StepContext) -> Tensor:
        """Logits [rows, V] of a step for which `fits` is true; valid until the next call."""
        plan = context.plans(self.model.device).pages
        shape = (min(_power_of_two(len(ids)), max(self.max_rows, len(ids))), _power_of_two(plan.pages.shape[1]))
        bucket = self._buckets.get(shape)
        if bucket is None:
            assert self._capture is not None, "call only if `fits` is true"
            bucket = _Bucket(self.model, self.cache, self.attention, plan, shape)
            with torch.cuda.device(self.model.device) if self.model.device.type == "cuda" else nullcontext():
                bucket.replay = self._capture(bucket.forward)
            self._buckets[shape] = bucket
        bucket.load(ids, context)
        return bucket.replay()[: len(ids)]

    def clear(self) -> None:
        """Delete all graphs; call when the cache that they point into is freed."""
        self._buckets.clear()


class _Bucket:
    """The inputs of one graph, at fixed addresses, and the attention context of its forward pass."""

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
        plans = context.plans(ids.device)
        own, new = self.page_plan, plans.pages
        for buffer, values, padding in (
            (self.ids, ids, 0),
            (self.positions, context.positions, 0),
            (self.slots, plans.slots, scratch * self.cache.page_size),
            (own.lengths, new.lengths, 1),
        ):
            buffer[:num_rows] = values
            buffer[num_rows:] = padding
        own.pages[:num_rows, : new.pages.shape[1]] = new.pages
        own.pages[num_rows:] = scratch

    def forward(self) -> Tensor:
        return self.model(self.ids, self)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.slots, k, v)
        return self.attention.pages(q, self.cache.k[layer], self.cache.v[layer], self.page_plan)[0]


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
