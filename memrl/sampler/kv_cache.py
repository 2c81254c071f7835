"""Keys and values of the rows in flight, and what prefill and decoding attend to.

Active rows always occupy places 0 .. n-1, so decoding reads the cache as a plain slice: when a row leaves, the last one moves
into its place.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from kernels import decode_attention, packed_attention
from memrl.model.attention import packed_positions
from memrl.model.transformer import Transformer, TransformerConfig

LENGTH_QUANTUM = 32  # capacity grows in steps of so many tokens, so that slightly longer prompts do not reallocate


class KVCache:
    """k and v of every layer, each [places, K, capacity, D]; `lengths` on the host says how much of a place is filled."""

    def __init__(self, model: Transformer):
        config = model.config
        self.shape = (config.num_kv_heads, config.head_size)
        self.dtype, self.device = model.dtype, model.device
        self.k = [self._empty(0, 0) for _ in range(config.num_layers)]
        self.v = [self._empty(0, 0) for _ in range(config.num_layers)]
        self.lengths: list[int] = []

    @staticmethod
    def bytes_per_token(config: TransformerConfig, dtype: torch.dtype) -> int:
        return 2 * config.num_layers * config.num_kv_heads * config.head_size * dtype.itemsize

    @staticmethod
    def round_up(num_tokens: int) -> int:
        return -(-num_tokens // LENGTH_QUANTUM) * LENGTH_QUANTUM

    def _empty(self, places: int, capacity: int) -> Tensor:
        # Zeros, not empty: attention multiplies masked values by zero, and uninitialised memory may hold NaN.
        num_kv_heads, head_size = self.shape
        return torch.zeros(places, num_kv_heads, capacity, head_size, dtype=self.dtype, device=self.device)

    def reserve(self, places: int, capacity: int) -> None:
        """Make room for so many rows of so many tokens, keeping the active rows' content.

        Neither number may be below what the active rows fill. A change gives exactly what was asked for: keeping the larger of
        old and new in both directions would multiply the places of many short rows with the capacity of a long one.
        """
        old_places, _, old_capacity, _ = self.k[0].shape
        if not self.lengths:  # nothing to keep, so this is also the moment to become smaller again
            if places > old_places or capacity > old_capacity or places * capacity * 4 < old_places * old_capacity:
                for tensors in (self.k, self.v):
                    for layer in range(len(tensors)):
                        tensors[layer] = self._empty(0, 0)  # free before allocating: never two caches at once
                        tensors[layer] = self._empty(places, capacity)
            return
        if places <= old_places and capacity <= old_capacity:
            return
        active, filled = len(self.lengths), max(self.lengths)
        for tensors in (self.k, self.v):
            for layer, old in enumerate(tensors):
                tensors[layer] = self._empty(places, capacity)
                tensors[layer][:active, :, :filled] = old[:active, :, :filled]

    def release(self) -> None:
        """Give the memory back; there must be no active rows."""
        assert not self.lengths, "rows are still active"
        for tensors in (self.k, self.v):
            tensors[:] = [self._empty(0, 0)] * len(tensors)

    def remove(self, place: int) -> None:
        """Free a place by moving the last active row into it."""
        last = len(self.lengths) - 1
        if place != last:
            filled = self.lengths[last]
            for tensor in (*self.k, *self.v):
                tensor[place, :, :filled] = tensor[last, :, :filled]
            self.lengths[place] = self.lengths[last]
        self.lengths.pop()


class PrefillContext:
    """New rows, packed end to end, each seeing itself; their keys and values go into the next free places."""

    def __init__(self, cache: KVCache, seq_lens: Sequence[int]):
        self.cache, self.seq_lens = cache, list(seq_lens)
        self.first_place = len(cache.lengths)
        self.positions = packed_positions(self.seq_lens, cache.device)
        cache.lengths.extend(self.seq_lens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start, place = 0, self.first_place
        for length, run in groupby(self.seq_lens):
            count = sum(1 for _ in run)
            end = start + count * length
            for cached, new in ((self.cache.k[layer], k), (self.cache.v[layer], v)):
                rows = new[start:end].unflatten(0, (count, length)).transpose(1, 2)  # (rows, K, length, D)
                cached[place : place + count, :, :length] = rows
            start, place = end, place + count
        return packed_attention(q, k, v, self.seq_lens)


class DecodeContext:
    """One new token for every active row, which sees that row's cache and itself."""

    def __init__(self, cache: KVCache):
        self.cache = cache
        self.positions = torch.tensor(cache.lengths, device=cache.device)
        cache.lengths = [length + 1 for length in cache.lengths]
        self.span = max(cache.lengths)
        self.places = torch.arange(len(cache.lengths), device=cache.device)
        self.mask = torch.arange(self.span, device=cache.device) <= self.positions[:, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_rows = len(self.places)
        k_cache, v_cache = self.cache.k[layer], self.cache.v[layer]
        k_cache[self.places, :, self.positions] = k
        v_cache[self.places, :, self.positions] = v
        return decode_attention(q, k_cache[:num_rows, :, : self.span], v_cache[:num_rows, :, : self.span], self.mask)
