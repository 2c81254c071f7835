"""The paged key/value cache, and the attention context of one sampler step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memrl.kernels.attention import AttentionBackend, merge_into
from memrl.model.transformer import Transformer, TransformerConfig
from memrl.sampler.scheduler import Chunk, Row, Step
from memrl.sampler.shared_runs import Run, RunPlan, find_runs

# Decoding rows read shared pages in a separate attention call if that saves reading at least this many tokens' keys; below that,
# the extra call costs more than it saves.
MIN_SAVED_TOKENS = 2048


class KVCache:
    """k and v of every layer, each [pages, page_size, K, D], on that layer's device."""

    def __init__(self, model: Transformer, num_pages: int, page_size: int):
        self.model, self.num_pages, self.page_size = model, num_pages, page_size
        self.scratch_page = num_pages  # an extra page that belongs to no row, for padding rows
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []

    @staticmethod
    def bytes_per_token(config: TransformerConfig, dtype: torch.dtype) -> int:
        return 2 * config.num_layers * config.num_kv_heads * config.head_size * dtype.itemsize

    def prepare(self, new_pages: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """Allocate the memory if needed, zero new pages, copy pages."""
        if not self.k:
            self._allocate()
        if not new_pages:
            return
        indices = (torch.tensor(new_pages), *torch.tensor(copies, dtype=torch.int64).view(-1, 2).T)
        by_device = {device: [pages.to(device) for pages in indices] for device in self.model.layer_devices()}
        for tensor in (*self.k, *self.v):
            new, sources, targets = by_device[tensor.device]
            # A page may be copied and allocated to another row in one step, so copy sources are read before any page is zeroed.
            copied = tensor[sources] if copies else None
            # Attention multiplies masked values by zero, but old content may be NaN.
            tensor.index_fill_(0, new, 0)
            if copied is not None:
                tensor[targets] = copied

    def release(self) -> None:
        """Free the memory."""
        self.k, self.v = [], []

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, K, D] at `slots` [T] = page * page_size + position in the page."""
        self.k[layer].flatten(0, 1).index_copy_(0, slots, k)
        self.v[layer].flatten(0, 1).index_copy_(0, slots, v)

    def _allocate(self) -> None:
        config = self.model.config
        shape = (self.num_pages + 1, self.page_size, config.num_kv_heads, config.head_size)
        # On a CPU the system provides memory when it is first written to, so a large cache_gib costs nothing there.
        self.k, self.v = (
            [torch.empty(shape, dtype=self.model.dtype, device=device) for device in self.model.layer_devices()] for _ in "kv"
        )


class StepContext:
    """The attention context of one step: prompt chunks first, then one token for each decoding row.

    A chunk's token sees the earlier tokens of the chunk and the row's cached tokens; the token of a decoding row sees the row's
    cached tokens, including itself. Keys and values are written before they are read, so rows can share pages that another row
    computes in the same step.
    """

    def __init__(self, cache: KVCache, attention: AttentionBackend, step: Step, decode_runs: RunPlan | None = None):
        """`decode_runs` come from `plan_decode_runs`; they are valid as long as the same rows decode."""
        self.cache, self.attention = cache, attention
        size = cache.page_size
        prefixes = [chunk.row.table[: -(-chunk.start // size)] for chunk in step.chunks]  # the pages with earlier tokens
        by_prefix = find_runs(prefixes, [chunk.start // size for chunk in step.chunks], size, 1)
        self.chunks = [step.chunks[i] for i in by_prefix.order]
        decode_runs = decode_runs or plan_decode_runs(step.decoding, size)
        self.rows = [step.decoding[i] for i in decode_runs.order]

        self.lens = [chunk.end - chunk.start for chunk in self.chunks]
        ends = np.cumsum([0, *self.lens])
        self.num_chunk_tokens = int(ends[-1])
        positions = [np.arange(chunk.start, chunk.end) for chunk in self.chunks]
        slots = [
            np.asarray(chunk.row.table)[at // size] * size + at % size for chunk, at in zip(self.chunks, positions, strict=True)
        ]
        last = np.array([row.length - 1 for row in self.rows], dtype=np.int64)
        pages = np.array([row.table[(row.length - 1) // size] for row in self.rows], dtype=np.int64)
        self._slots = torch.from_numpy(np.concatenate([*slots, pages * size + last % size]))
        self.positions = torch.from_numpy(np.concatenate([*positions, last])).to(cache.model.device)

        own = _own_prefixes(by_prefix, self.chunks, prefixes, size)
        self.runs = [(slice(int(ends[run.first]), int(ends[run.last])), run) for run in by_prefix.runs + own]
        offset = self.num_chunk_tokens
        self.runs += [(slice(offset + run.first, offset + run.last), run) for run in decode_runs.runs]
        self._covered = decode_runs.covered
        self._plans: dict[torch.device, StepPlans] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plans, split = self.plans(q.device), self.num_chunk_tokens
        self.cache.write(layer, plans.slots, k, v)
        k_pages, v_pages = self.cache.k[layer], self.cache.v[layer]
        parts = []
        if plans.packed is not None:
            parts.append(self.attention.packed_lse(q[:split], k[:split], v[:split], plans.packed))
        if plans.pages is not None:
            parts.append(self.attention.pages(q[split:], k_pages, v_pages, plans.pages))
        out, lse = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        for tokens, pages, num_tokens in plans.runs:
            shared = (cached[pages].flatten(0, 1)[:num_tokens] for cached in (k_pages, v_pages))
            merge_into(out, lse, tokens, *self.attention.dense(q[tokens], *shared))
        return out

    def plans(self, device: torch.device) -> "StepPlans":
        """The step's plans on a device, made when its first layer runs."""
        if device not in self._plans:
            self._plans[device] = StepPlans(
                self._slots.to(device, non_blocking=True),
                self.attention.plan_packed(self.lens, device) if self.lens else None,
                self._plan_pages(device) if self.rows else None,
                [(tokens, _pages_of(run, device), run.num_tokens) for tokens, run in self.runs],
            )
        return self._plans[device]

    @property
    def input_ids(self) -> list[int]:
        ids = [token for chunk in self.chunks for token in chunk.row.request.prompt_ids[chunk.start : chunk.end]]
        return ids + [row.ids(row.length - 1, row.length)[0] for row in self.rows]

    def sampled(self) -> tuple[list[int], list[Row]]:
        """Indices in the step of the tokens whose next token is sampled, and their rows."""
        indices, rows, end = [], [], 0
        for chunk in self.chunks:
            end += chunk.end - chunk.start
            if chunk.end == len(chunk.row.request.prompt_ids):
                indices.append(end - 1)
                rows.append(chunk.row)
        indices += range(end, end + len(self.rows))
        return indices, rows + self.rows

    def _plan_pages(self, device: torch.device) -> Any:
        size = self.cache.page_size
        tables = [row.table[skip:] for row, skip in zip(self.rows, self._covered, strict=True)]
        width = max(map(len, tables))
        padded = torch.tensor([table + [0] * (width - len(table)) for table in tables])
        lengths = torch.tensor([row.length - skip * size for row, skip in zip(self.rows, self._covered, strict=True)])
        return self.attention.plan_pages(padded, lengths, size, device)


@dataclass(frozen=True)
class StepPlans:
    """A step on one device: slots of its keys, the attention backend's plans (None: no such tokens), runs of shared pages."""

    slots: Tensor
    packed: Any
    pages: Any
    runs: list[tuple[slice, slice | Tensor, int]]


def plan_decode_runs(rows: Sequence[Row], page_size: int) -> RunPlan:
    """Runs of the decoding rows' shared pages, never with a row's last page, which it writes to."""
    return find_runs([row.table for row in rows], [(row.length - 1) // page_size for row in rows], page_size, MIN_SAVED_TOKENS)


def _own_prefixes(plan: RunPlan, chunks: Sequence[Chunk], prefixes: Sequence[list[int]], page_size: int) -> list[Run]:
    """For each chunk, the pages before it that no shared run covers, including the partly filled last one."""
    runs = []
    for index, (chunk, row) in enumerate(zip(chunks, plan.order, strict=True)):
        skip = plan.covered[index]
        if chunk.start > skip * page_size:
            runs.append(Run(index, index + 1, tuple(prefixes[row][skip:]), chunk.start - skip * page_size))
    return runs


def _pages_of(run: Run, device: torch.device) -> slice | Tensor:
    """A run's pages, as a slice if they are adjacent, so that they are read in place."""
    first, count = run.pages[0], len(run.pages)
    if run.pages == tuple(range(first, first + count)):
        return slice(first, first + count)
    return torch.tensor(run.pages, device=device)
