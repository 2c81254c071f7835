"""The miniatures: closed languages in which a small model learns in minutes, each with lessons for its start."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from memrl.agents import AgentConfig
from memrl.config import WarmStartOptions
from memrl.data import arithmetic
from memrl.data.needle import build_tokenizer
from memrl.miniature import bench_lessons
from memrl.miniature.arithmetic_lessons import arithmetic_lessons
from memrl.miniature.needle_lessons import needle_lessons
from memrl.tokenizer import Tokenizer

MakeLessons = Callable[[random.Random, WarmStartOptions, Tokenizer, AgentConfig], Iterator[tuple[list[int], list[int]]]]


@dataclass(frozen=True)
class Miniature:
    """A closed language and the start that is made for it.

    Attributes:
        build_tokenizer: a `transformers.PreTrainedTokenizerFast`.
        lessons: endless single turns, ids of prompt and response; a function of the generator's state.
        num_layers, num_heads: of the model; a head has 24 dimensions.
    """

    build_tokenizer: Callable[[], Any]
    lessons: MakeLessons
    num_layers: int = 2
    num_heads: int = 4


MINIATURES = {
    "needle": Miniature(build_tokenizer, needle_lessons),
    "bench": Miniature(bench_lessons.build_tokenizer, bench_lessons.lessons),
    "arithmetic": Miniature(arithmetic.build_tokenizer, arithmetic_lessons),
}


def find_miniature(name: str) -> Miniature:
    """The miniature of this name (`model.miniature`); ValueError if there is none."""
    if name not in MINIATURES:
        raise ValueError(f"model.miniature is {name!r}; it must be one of {', '.join(MINIATURES)}")
    return MINIATURES[name]
