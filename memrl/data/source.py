"""Which samples a training step reads: a function of (seed, step) only, so there is no cursor to save or to lose."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from memrl.config import DataOptions
from memrl.data.custom import load_jsonl
from memrl.data.needle import make_sample
from memrl.sampler.sampling import row_seed
from memrl.types import Sample


class Source(Protocol):
    def sample(self, step: int, index: int) -> Sample:
        """The `index`-th of the step's samples."""
        ...


class NeedleSource:
    """The miniature's documents, generated; all documents of a step have the same number of chunks."""

    def __init__(self, options: DataOptions, seed: int):
        self.options, self.seed = options, seed

    def sample(self, step: int, index: int) -> Sample:
        chunks = random.Random(row_seed(self.seed, step)).randint(self.options.min_chunks, self.options.max_chunks)
        return make_sample(chunks, row_seed(self.seed, step, index))


class FileSource:
    """A JSON lines file, read in a fresh order each epoch; an epoch's last incomplete batch runs on into the next epoch."""

    def __init__(self, path: str | Path, prompts_per_step: int, shuffle: bool, seed: int):
        self.samples = load_jsonl(path)
        self.prompts_per_step, self.shuffle = prompts_per_step, shuffle
        self._order = lru_cache(maxsize=2)(self._epoch_order)
        self.seed = seed

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(len(self.samples)))
        if self.shuffle:
            random.Random(row_seed(self.seed, epoch)).shuffle(order)
        return order

    def sample(self, step: int, index: int) -> Sample:
        epoch, place = divmod(step * self.prompts_per_step + index, len(self.samples))
        return self.samples[self._order(epoch)[place]]
