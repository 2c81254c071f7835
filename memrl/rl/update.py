"""The optimizer steps of one step: their turns, the log-probabilities of frozen policies, and the gradient.

updates = [prepare_update(...), ...]       whole groups, balanced by tokens, packed, equally many micro-batches on every rank
add_logprobs(updates, ...)                 the reference's, and with a correction the trainer's own, before any weight changes
accumulate_gradients(engine, update, ...)  forward and backward passes; one engine.step() follows
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from memrl.config import RLOptions
from memrl.engine import distributed
from memrl.engine.deepspeed_engine import Engine
from memrl.kernels.attention import AttentionBackend
from memrl.model.attention_context import PackedContext
from memrl.rl.aggregation import token_weights
from memrl.rl.loss import LossOptions, policy_loss
from memrl.rl.mismatch import correction, mismatch_metrics
from memrl.rl.packing import MicroBatch, TrainTurn, balanced_partition, empty_micro_batch, pack_turns
from memrl.rl.reference import Reference


@dataclass
class Update:
    """One optimizer step's work on this rank.

    Attributes:
        batches: equally many on every rank, because ZeRO-3 gathers weights collectively.
        num_tokens: response tokens that are trained on, over all ranks.
        num_turns: their turns, over all ranks.
    """

    batches: list[MicroBatch]
    num_tokens: int
    num_turns: int


def loss_options(rl: RLOptions) -> LossOptions:
    return LossOptions(
        kind=rl.loss,
        clip_low=rl.clip_low,
        clip_high=rl.clip_high,
        dual_clip=rl.dual_clip,
        kl_coef=rl.kl_coef,
        kl_estimator=rl.kl_estimator,
        entropy_coef=rl.entropy_coef,
    )


def split_groups(turns: dict[int, list[TrainTurn]], num_updates: int) -> list[list[TrainTurn]]:
    """This rank's turns of each optimizer step: whole groups, nearly the same number of tokens in every step. Collective.

    Where groups were left out there are fewer steps, so that none has fewer groups than it would have had with all of them: a
    mean over few groups is a noisier gradient of the same size.

    Args:
        turns: by group id, those that this rank sampled; a group that was left out has none.
        num_updates: optimizer steps if no group is left out.
    """
    sizes = {group_id: sum(turn.num_inputs for turn in group) for group_id, group in turns.items()}
    all_sizes = sorted(distributed.gather_lists(list(sizes.items())))
    left = sum(size > 0 for _, size in all_sizes)
    num_updates = max(1, num_updates * left // len(all_sizes))
    parts = balanced_partition([size for _, size in all_sizes], num_updates)
    updates: list[list[TrainTurn]] = [[] for _ in range(num_updates)]
    for (group_id, _), part in zip(all_sizes, parts, strict=True):
        updates[part] += turns.get(group_id, [])
    return updates


def prepare_update(turns: list[TrainTurn], rl: RLOptions) -> Update | None:
    """Weigh the tokens of one optimizer step's turns, balance the turns over ranks, and pack them. Collective.

    Args:
        turns: those that this rank sampled; other ranks may compute on them.

    Returns:
        None if no rank has a turn.
    """
    lens = torch.tensor([len(turn.turn.response_ids) for turn in turns], dtype=torch.int64)
    trajectory_ids = torch.tensor([turn.trajectory_id for turn in turns], dtype=torch.int64)
    group_ids = torch.tensor([turn.group_id for turn in turns], dtype=torch.int64)
    weights, count = token_weights(rl.aggregation, lens, trajectory_ids, group_ids, rl.aggregation_tokens)
    trained = [turn for turn in turns if not turn.only_counted]
    num_trained = sum(len(turn.turn.response_ids) for turn in trained)
    counts = torch.tensor([count, num_trained, len(trained)], dtype=torch.float64)
    denominator, num_tokens, num_turns = distributed.sum_over_ranks(counts).tolist()
    if num_tokens == 0:
        return None
    for turn, weight in zip(turns, weights.tolist(), strict=True):
        turn.weight = weight / denominator
    batches = pack_turns(rebalance(trained), rl.micro_batch_tokens)
    batches += [empty_micro_batch()] * (distributed.max_over_ranks(len(batches)) - len(batches))
    return Update(batches, int(num_tokens), int(num_turns))


def rebalance(turns: list[TrainTurn]) -> list[TrainTurn]:
    """Exchange turns, so that every rank has nearly the same number of tokens; the gradient does not change. Collective."""
    if distributed.world_size() == 1:
        return turns
    all_turns = distributed.gather_lists(turns)
    parts = balanced_partition([turn.num_inputs for turn in all_turns], distributed.world_size())
    return [turn for turn, part in zip(all_turns, parts, strict=True) if part == distributed.rank()]


@torch.no_grad()
def add_logprobs(
    updates: list[Update],
    engine: Engine,
    reference: Reference | None,
    rl: RLOptions,
    temperature: float,
    attention: AttentionBackend | None = None,
) -> None:
    """Add the log-probabilities of frozen policies to the batches, once for all passes; call it before any weight changes.

    `ref_logprobs` are the reference's. With `rl.mismatch`, `old_logprobs` become the trainer's own, so that the ratio measures
    the updates alone, and `correction` weighs the difference between sampler and trainer.
    """
    batches = [batch for update in updates for batch in update.batches]
    if reference is not None:
        with reference.ready():
            for batch in batches:
                batch.ref_logprobs = reference.logprobs(*_to_device(batch, attention), temperature).cpu()
    if rl.mismatch != "off":
        for batch in batches:
            batch.old_logprobs = _forward(engine, *_to_device(batch, attention), temperature)[0].cpu()
            batch.correction = correction(
                batch.old_logprobs, batch.sampler_logprobs, batch.turn_index, rl.mismatch, rl.mismatch_bound
            )


def _to_device(batch: MicroBatch, attention: AttentionBackend | None) -> tuple[MicroBatch, PackedContext]:
    device = distributed.device()
    return batch.to(device), PackedContext(batch.seq_lens, device, attention)


def _forward(engine: Engine, batch: MicroBatch, context: PackedContext, temperature: float) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy of its distribution in nats, both fp32 [N]."""
    return engine(batch.ids, context, batch.select, batch.targets, temperature)


def accumulate_gradients(
    engine: Engine, update: Update, rl: RLOptions, temperature: float, attention: AttentionBackend | None = None
) -> dict[str, float]:
    """Run forward and backward over the update's micro-batches. Collective over ranks.

    Returns:
        Token means over all ranks by metric name, "logprob_diff_max", and the numbers of "tokens" and "turns".
    """
    options = loss_options(rl)
    sums: dict[str, Tensor] = {}
    largest_diff = torch.zeros((), device=distributed.device())
    for index, cpu_batch in enumerate(update.batches):
        batch, context = _to_device(cpu_batch, attention)
        logprobs, entropies = _forward(engine, batch, context, temperature)
        loss, metrics = policy_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            options,
            weights=batch.weights,
            ref_logprobs=batch.ref_logprobs,
            turn_index=batch.turn_index,
            entropies=entropies,
            correction=batch.correction,
        )
        engine.backward(loss, is_last=index == len(update.batches) - 1)
        logprobs = logprobs.detach()
        metrics |= mismatch_metrics(logprobs, batch.sampler_logprobs) | {"entropy": entropies.detach().sum()}
        if batch.correction is not None:
            metrics["correction"] = batch.correction.sum()
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value.double()
        if len(logprobs):
            largest_diff = torch.maximum(largest_diff, (logprobs - batch.sampler_logprobs).abs().max())
    return _update_means(sums, update) | {
        "logprob_diff_max": max(distributed.gather_lists([float(largest_diff)])),
        "tokens": float(update.num_tokens),
        "turns": float(update.num_turns),
    }


def _update_means(sums: dict[str, Tensor], update: Update) -> dict[str, float]:
    """Sums on this rank to token means over all ranks. Collective."""
    # A rank with empty micro-batches only has no reference and no correction, so the names may differ between ranks.
    names = sorted(set(distributed.gather_lists(sorted(sums))))
    own = torch.stack([torch.as_tensor(sums.get(name, 0.0), dtype=torch.float64, device=distributed.device()) for name in names])
    means = distributed.sum_over_ranks(own) / update.num_tokens
    return dict(zip(names, means.tolist(), strict=True))
