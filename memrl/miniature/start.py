"""Make a miniature's start: train random weights, in minutes, on single turns.

A small model trained on the task alone does not learn to look things up in reasonable time. So it first learns that on random
text that quotes itself, and then the form of the task from the lessons of its miniature.
"""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from memrl.agents import AgentConfig
from memrl.agents.agent_file import save_agent
from memrl.config import WarmStartOptions
from memrl.miniature.registry import MakeLessons, Miniature
from memrl.model import PackedContext, Transformer, TransformerConfig, save_model
from memrl.model.loader import from_scratch
from memrl.model.positions import RopeConfig
from memrl.rl.packing import TrainTurn, pack_turns
from memrl.tokenizer import Tokenizer
from memrl.types import Turn
from memrl.utils.checksums import SUMS, damaged_files, read_sums, write_sums
from memrl.utils.progress import Progress

QUOTE_RATE, TEACH_RATE = 7e-3, 3e-3  # peak learning rates of the two phases
NUM_WORDS, NUM_DISTINCT, NUM_QUOTES, QUOTE_WORDS, CUE_WORDS = 20, 12, 6, 5, 2


class Batch(NamedTuple):
    """Packed sequences and their target tokens; fields as in `memrl.rl.packing.MicroBatch`."""

    ids: Tensor
    seq_lens: list[int]
    select: Tensor
    targets: Tensor


def make_start(folder: Path, miniature: Miniature, agent: AgentConfig, options: WarmStartOptions, seed: int) -> None:
    """Write the warmed-up miniature as a Hugging Face folder."""
    tokenizer = Tokenizer(miniature.build_tokenizer())
    model = build_model(tokenizer.vocab_size, seed, miniature.num_layers, miniature.num_heads)
    with Progress("warm start", options.quote_steps + options.teach_steps, "steps") as progress:
        warm_up(model, tokenizer, miniature.lessons, agent, options, seed, progress.advance)

    def finish(new: Path) -> None:
        save_agent(agent, new)
        write_sums(new)

    save_model(model, folder, tokenizer, finish=finish)


def check_start(folder: Path) -> None:
    """Raise ValueError if the start has changed since the run made it: the policy and its reference would be others."""
    if not (folder / SUMS).exists():
        return  # of an earlier version
    if problems := damaged_files(folder, read_sums(folder)):
        raise ValueError(f"the start of the run in {folder} is damaged ({problems[0]}); delete {folder}, and it is made again")


def build_model(vocab_size: int, seed: int, num_layers: int = 2, num_heads: int = 4) -> Transformer:
    """A Qwen2, by default of 176,000 parameters; its first layer's heads initially attend 1, 2, 3, 4, ... tokens back."""
    config = TransformerConfig(
        vocab_size=vocab_size,
        hidden_size=24 * num_heads,
        intermediate_size=48 * num_heads,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads // 2,
        head_size=24,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        rope=RopeConfig(theta=10_000.0),
    )
    model = from_scratch(config, seed)
    q_proj, k_proj = (model.get_submodule(f"model.layers.0.self_attn.{name}") for name in ("q_proj", "k_proj"))
    assert isinstance(q_proj, nn.Linear) and isinstance(k_proj, nn.Linear)
    look_back(q_proj, k_proj, model.inverse_frequencies)
    return model


@torch.no_grad()
def look_back(q_proj: nn.Linear, k_proj: nn.Linear, frequencies: Tensor, strength: float = 6.0, num_fast: int = 2) -> None:
    """Set the biases so that head h initially attends to the token 1 + h places back, for almost any tokens.

    Every key gets the same bias b on its fastest rotary pairs, and head h's query gets b rotated by -(1 + h) positions. The
    rotary embedding rotates both by their own positions, so their product is largest if the key is 1 + h places before the query.

    Args:
        frequencies: fp32 [D/2], radians per position of each pair.
    """
    half = len(frequencies)
    pair = torch.zeros(half)
    pair[:num_fast] = strength / math.sqrt(2)
    k_proj.bias.copy_(torch.cat((pair, pair)).repeat(k_proj.out_features // (2 * half)))
    for head, bias in enumerate(q_proj.bias.view(-1, 2 * half)):
        angle = -(1 + head) * frequencies
        first = pair * angle.cos() - pair * angle.sin()
        second = pair * angle.cos() + pair * angle.sin()
        bias.copy_(torch.cat((first, second)))


def warm_up(
    model: Transformer,
    tokenizer: Tokenizer,
    make_lessons: MakeLessons,
    agent: AgentConfig,
    options: WarmStartOptions,
    seed: int,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Train `model` in place through both phases; deterministic in `seed`."""
    first_word, end_word = len(tokenizer.special_ids), len(tokenizer.hf)
    quotes = quote_batches(np.random.default_rng((seed, 0)), options.batch_size, first_word, end_word)
    lessons = lesson_batches(make_lessons(random.Random(f"{seed} lessons"), options, tokenizer, agent), options.batch_size)
    phases: tuple[tuple[Iterator[Batch], int, float, Callable[[float], float]], ...] = (
        (quotes, options.quote_steps, QUOTE_RATE, lambda part: 1 - part),
        (lessons, options.teach_steps, TEACH_RATE, lambda part: 0.5 * (1 + math.cos(math.pi * part))),
    )
    model.train()
    for batches, steps, peak_rate, schedule in phases:
        optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate, betas=(0.9, 0.98), weight_decay=0.01)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = peak_rate * schedule(step / steps)
            batch = next(batches)
            logprobs, _ = model(batch.ids, PackedContext(batch.seq_lens), batch.select, batch.targets)
            optimizer.zero_grad()
            (-logprobs.mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            on_step()


def quote_batches(rng: np.random.Generator, batch_size: int, first_word: int, end_word: int) -> Iterator[Batch]:
    """Random text that quotes itself: 20 words, drawn from 12, then 6 quotes of 5 consecutive ones.

    The first two words of a quote identify its place in the text (a single word may occur twice); the other three are targets.
    """
    text_len = NUM_WORDS + NUM_QUOTES * QUOTE_WORDS
    quoted = NUM_WORDS + np.arange(NUM_QUOTES)[:, None] * QUOTE_WORDS + np.arange(CUE_WORDS, QUOTE_WORDS)
    learned = (np.arange(batch_size)[:, None] * text_len + quoted.ravel()).ravel()
    select = torch.from_numpy(learned - 1)
    while True:
        distinct = np.argsort(rng.random((batch_size, end_word - first_word)), axis=1)[:, :NUM_DISTINCT] + first_word
        order = np.argsort(rng.random((batch_size, NUM_WORDS)), axis=1) % NUM_DISTINCT
        text = np.take_along_axis(distinct, order, axis=1)
        starts = rng.integers(0, NUM_WORDS - QUOTE_WORDS + 1, size=(batch_size, NUM_QUOTES, 1))
        places = (starts + np.arange(QUOTE_WORDS)).reshape(batch_size, -1)
        ids = torch.from_numpy(np.concatenate((text, np.take_along_axis(text, places, axis=1)), axis=1).ravel())
        yield Batch(ids, [text_len] * batch_size, select, ids[learned])


def lesson_batches(lessons: Iterator[tuple[list[int], list[int]]], batch_size: int) -> Iterator[Batch]:
    """Batches of lessons, each of them the ids of a prompt and of its response."""
    while True:
        pairs = [next(lessons) for _ in range(batch_size)]
        turns = [TrainTurn(Turn("lesson", prompt, response, [], "stop"), advantage=0.0) for prompt, response in pairs]
        [packed] = pack_turns(turns, max_tokens=sum(turn.num_inputs for turn in turns))
        yield Batch(packed.ids, packed.seq_lens, packed.select, packed.targets)
