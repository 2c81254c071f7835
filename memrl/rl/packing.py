"""Turns to micro-batches: packed token rows without padding, with at most a given number of tokens each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memrl.types import Turn


@dataclass
class TrainTurn:
    """A turn with its share of the trajectory's advantage.

    Attributes:
        advantage: the same on every response token.
        group_id, trajectory_id: where the turn comes from; means over groups or trajectories need them.
        weight: of each response token in the optimizer step's loss; see `memrl/rl/aggregation.py`.
        only_counted: not trained on, but counted in the loss's denominator.
    """

    turn: Turn
    advantage: float
    group_id: int = 0
    trajectory_id: int = 0
    weight: float = 0.0
    only_counted: bool = False

    @property
    def num_inputs(self) -> int:
        # The last response token predicts nothing, so it is no input.
        return self.turn.num_tokens - 1


@dataclass
class MicroBatch:
    """Some turns, packed end to end.

    Example, turns [a b | c d] and [e | f] (prompt | response):

        ids      a b c | e        seq_lens 3, 1
        select   1 2 3            positions of b, c, e, the tokens that predict a response token
        targets  c d f

    Attributes:
        ids: int64 [T].
        seq_lens: tokens of each turn, T in all; ascending, so that equal lengths are neighbours.
        select: int64 [N], positions in `ids`.
        targets: int64 [N], the response ids.
        turn_index: int64 [N], index of the turn that each target belongs to.
        sampler_logprobs: fp32 [N], of the policy that sampled, computed by the sampler.
        old_logprobs: fp32 [N], of the same policy, for the ratio: the sampler's, or the trainer's if the mismatch of the two is
            corrected.
        advantages, weights: fp32 [N].
        ref_logprobs: fp32 [N], of the frozen reference; None without a penalty.
        correction: fp32 [N], weights against the mismatch of sampler and trainer; None without.
    """

    ids: Tensor
    seq_lens: list[int]
    select: Tensor
    targets: Tensor
    turn_index: Tensor
    sampler_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    ref_logprobs: Tensor | None = None
    correction: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Response tokens, N."""
        return len(self.targets)

    def to(self, device: torch.device | str) -> "MicroBatch":
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


def pack_turns(turns: Sequence[TrainTurn], max_tokens: int) -> list[MicroBatch]:
    """Pack turns into micro-batches of at most `max_tokens` inputs; ValueError if a single turn is larger than `max_tokens`."""
    return [pack(members) for members in fill_batches(turns, max_tokens)]


def fill_batches(turns: Sequence[TrainTurn], max_tokens: int) -> list[list[TrainTurn]]:
    """The turns of each micro-batch, shortest first; as `pack_turns`.

    They are filled by first-fit decreasing: the longest turns first, each into the first micro-batch with room for it.
    """
    bins: list[tuple[int, list[TrainTurn]]] = []
    for turn in sorted(turns, key=lambda t: -t.num_inputs):
        size = turn.num_inputs
        if size > max_tokens:
            raise ValueError(
                f"a turn of {size} tokens does not fit into rl.micro_batch_tokens = {max_tokens}; raise that, or lower the "
                "agent's limits"
            )
        for i, (used, members) in enumerate(bins):
            if used + size <= max_tokens:
                members.append(turn)
                bins[i] = (used + size, members)
                break
        else:
            bins.append((size, [turn]))
    return [sorted(members, key=lambda t: t.num_inputs) for _, members in bins]


def balanced_partition(sizes: Sequence[int], num_parts: int) -> list[int]:
    """The part of each item, such that the parts' sums are nearly equal: largest item first, always to the smallest part.

    >>> balanced_partition([5, 1, 4, 2], 2)
    [0, 0, 1, 1]
    """
    sums = [0] * num_parts
    parts = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        parts[item] = min(range(num_parts), key=sums.__getitem__)
        sums[parts[item]] += sizes[item]
    return parts


def empty_micro_batch() -> MicroBatch:
    """One input token and no targets. A rank without work runs it while others compute: ZeRO-3 gathers weights collectively."""
    no_values, no_ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    return MicroBatch(torch.zeros(1, dtype=torch.int64), [1], no_ids, no_ids, no_ids, *[no_values] * 4)


def pack(turns: list[TrainTurn]) -> MicroBatch:
    """One micro-batch of the turns in this order."""
    ids: list[int] = []
    targets: list[int] = []
    logprobs: list[float] = []
    select = []
    for item in turns:
        turn = item.turn
        last_of_prompt = len(ids) + len(turn.prompt_ids) - 1  # predicts the first response token
        select.append(torch.arange(last_of_prompt, last_of_prompt + len(turn.response_ids)))
        ids += turn.prompt_ids
        ids += turn.response_ids[:-1]
        targets += turn.response_ids
        logprobs += turn.response_logprobs
    turn_index = torch.repeat_interleave(torch.tensor([len(item.turn.response_ids) for item in turns]))
    sampler_logprobs = torch.tensor(logprobs, dtype=torch.float32)
    return MicroBatch(
        ids=torch.tensor(ids),
        seq_lens=[item.num_inputs for item in turns],
        select=torch.cat(select),
        targets=torch.tensor(targets),
        turn_index=turn_index,
        sampler_logprobs=sampler_logprobs,
        old_logprobs=sampler_logprobs,
        advantages=torch.tensor([item.advantage for item in turns], dtype=torch.float32)[turn_index],
        weights=torch.tensor([item.weight for item in turns], dtype=torch.float32)[turn_index],
    )
