"""Choose the samples of a training step as a function of (seed, step), so that a checkpoint needs no position in the data."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from memrl.config import DataOptions
from memrl.data import load_samples
from memrl.data.generated import generator
from memrl.types import Sample
from memrl.utils.seeds import row_seed

GOLDEN = 0.6180339887498949  # its multiples modulo 1 are evenly spread, however many there are


class Source(Protocol):
    def sample(self, step: int, index: int, round_number: int = 0) -> Sample:
        """Sample number `index` of the step; each round of dynamic sampling has other samples."""
        ...


class NeedleSource:
    """Generated documents of the miniature; all documents of a step have the same number of chunks."""

    def __init__(self, options: DataOptions, seed: int):
        self.options, self.seed = options, seed

    def sample(self, step: int, index: int, round_number: int = 0) -> Sample:
        chunks = random.Random(row_seed(self.seed, step)).randint(self.options.min_chunks, self.options.max_chunks)
        later = (round_number,) if round_number else ()
        return generator(self.options.tasks, index)(chunks, row_seed(self.seed, step, index, *later))


class FileSource:
    """A data set in a file, read in a new order each epoch; the last incomplete batch continues with the next epoch.

    Each later round of dynamic sampling passes over the file in its own order (without shuffling, from its own start).
    """

    def __init__(self, path: str | Path, prompts_per_step: int, shuffle: bool, seed: int, allow_files: bool = False):
        self.samples = load_samples(path, allow_files)
        self.prompts_per_step, self.shuffle = prompts_per_step, shuffle
        self._order = lru_cache(maxsize=8)(self._epoch_order)
        self.seed = seed

    def _epoch_order(self, epoch: int, round_number: int) -> list[int]:
        order = list(range(len(self.samples)))
        if self.shuffle:
            later = (round_number,) if round_number else ()
            random.Random(row_seed(self.seed, epoch, *later)).shuffle(order)
        else:
            start = int(GOLDEN * round_number % 1 * len(order))
            order = order[start:] + order[:start]
        return order

    def sample(self, step: int, index: int, round_number: int = 0) -> Sample:
        epoch, place = divmod(step * self.prompts_per_step + index, len(self.samples))
        return self.samples[self._order(epoch, round_number)[place]]
