"""One step's optimizer steps: which turns each takes, what they need besides the policy, and the gradient.

updates = [prepare_update(...), ...]       whole groups, balanced by tokens, packed, as many micro-batches on every rank
add_logprobs(updates, ...)                 reference and, where asked, recomputed old log-probabilities, before anything moves
accumulate_gradients(engine, update, ...)  forward and backward; one engine.step() follows
"""

from dataclasses import dataclass

import torch

from memrl.config import RLOptions
from memrl.engine import distributed
from memrl.engine.deepspeed_engine import Engine
from memrl.kernels.attention import AttentionBackend
from memrl.model.attention_context import PackedContext
from memrl.rl.aggregation import token_weights
from memrl.rl.loss import policy_loss
from memrl.rl.mismatch import correction, mismatch_metrics
from memrl.rl.packing import MicroBatch, TrainTurn, empty_micro_batch, pack_turns, share_out
from memrl.rl.reference import Reference


@dataclass
class Update:
    """One optimizer step's work on this rank.

    Attributes:
        batches: as many on every rank, because ZeRO-3 gathers weights collectively.
        num_tokens: response tokens over all ranks.
        num_turns: turns over all ranks.
    """

    batches: list[MicroBatch]
    num_tokens: int
    num_turns: int


def split_groups(turns: dict[int, list[TrainTurn]], num_updates: int) -> list[list[TrainTurn]]:
    """This rank's turns of each optimizer step, whole groups together; the steps have nearly equal numbers of tokens. Collective.

    Args:
        turns: by group id, those that this rank sampled.
    """
    sizes = {group_id: sum(turn.num_inputs for turn in group) for group_id, group in turns.items()}
    everyone = sorted(distributed.gather_lists(list(sizes.items())))
    parts = share_out([size for _, size in everyone], num_updates)
    chosen: list[list[TrainTurn]] = [[] for _ in range(num_updates)]
    for (group_id, _), part in zip(everyone, parts, strict=True):
        chosen[part] += turns.get(group_id, [])
    return chosen


def prepare_update(turns: list[TrainTurn], rl: RLOptions) -> Update | None:
    """Weigh, share out over ranks and pack one optimizer step's turns; None when no rank has any. Collective.

    Args:
        turns: those that this rank sampled. Who computes on them is decided here, by size: the ranks' shares of one optimizer
            step can be very unequal, and the gradient does not depend on the cut.
    """
    lens = torch.tensor([len(turn.turn.response_ids) for turn in turns], dtype=torch.int64)
    trajectory_ids = torch.tensor([turn.trajectory_id for turn in turns], dtype=torch.int64)
    group_ids = torch.tensor([turn.group_id for turn in turns], dtype=torch.int64)
    weights, count = token_weights(rl.aggregation, lens, trajectory_ids, group_ids, rl.aggregation_tokens)
    mine = torch.tensor([count, float(lens.sum()), float(len(turns))], dtype=torch.float64)
    denominator, num_tokens, num_turns = distributed.sum_over_ranks(mine).tolist()
    if num_tokens == 0:
        return None
    for turn, weight in zip(turns, weights.tolist(), strict=True):
        turn.weight = weight / denominator
    batches = pack_turns(balanced_share(turns), rl.micro_batch_tokens)
    batches += [empty_micro_batch()] * (distributed.max_over_ranks(len(batches)) - len(batches))
    return Update(batches, int(num_tokens), int(num_turns))


def balanced_share(turns: list[TrainTurn]) -> list[TrainTurn]:
    """This rank's part of all ranks' turns, nearly the same number of tokens on each rank; collective."""
    if distributed.world_size() == 1:
        return turns
    everyone = distributed.gather_lists(turns)
    parts = share_out([turn.num_inputs for turn in everyone], distributed.world_size())
    return [turn for turn, part in zip(everyone, parts, strict=True) if part == distributed.rank()]


@torch.no_grad()
def add_logprobs(
    updates: list[Update],
    engine: Engine,
    reference: Reference | None,
    rl: RLOptions,
    temperature: float,
    attention: AttentionBackend | None = None,
) -> None:
    """Fill in what the loss needs of frozen policies, once for all passes over the batches; the weights must not have moved yet.

    `ref_logprobs` are the reference's. Where `rl.mismatch` is on, `old_logprobs` become the trainer's own, so that the ratio says
    how far the updates have moved, and `correction` weighs what sampler and trainer disagree about.
    """
    batches = [batch for update in updates for batch in update.batches]
    if reference is not None:
        with reference.ready():
            for batch in batches:
                batch.ref_logprobs = _logprobs(reference.logprobs, batch, temperature, attention)
    if rl.mismatch != "off":
        for batch in batches:
            batch.old_logprobs = _logprobs(_policy_logprobs(engine), batch, temperature, attention)
            batch.correction = correction(
                batch.old_logprobs, batch.sampler_logprobs, batch.turn_index, rl.mismatch, rl.mismatch_bound
            )


def _logprobs(policy, batch: MicroBatch, temperature: float, attention: AttentionBackend | None) -> torch.Tensor:
    device = distributed.device()
    return policy(batch.to(device), PackedContext(batch.seq_lens, device, attention), temperature).cpu()


def _policy_logprobs(engine: Engine):
    return lambda batch, context, temperature: engine(batch.ids, context, batch.select, batch.targets, temperature)[0]


def accumulate_gradients(
    engine: Engine, update: Update, rl: RLOptions, temperature: float, attention: AttentionBackend | None = None
) -> dict[str, float]:
    """Forward and backward over the update's micro-batches, on all ranks together.

    Returns:
        Token means over all ranks by metric name, "logprob_diff_max", and "tokens" and "turns" (their numbers).
    """
    device = distributed.device()
    sums: dict[str, torch.Tensor] = {}
    largest_diff = torch.zeros((), device=device)
    for index, cpu_batch in enumerate(update.batches):
        batch = cpu_batch.to(device)
        context = PackedContext(batch.seq_lens, device, attention)
        logprobs, entropies = engine(batch.ids, context, batch.select, batch.targets, temperature)
        loss, metrics = policy_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.ref_logprobs,
            weights=batch.weights,
            turn_index=batch.turn_index,
            entropies=entropies,
            correction=batch.correction,
            kind=rl.loss,
            clip_low=rl.clip_low,
            clip_high=rl.clip_high,
            dual_clip=rl.dual_clip,
            kl_coef=rl.kl_coef,
            kl_estimator=rl.kl_estimator,
            entropy_coef=rl.entropy_coef,
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
    # A rank may hold empty micro-batches alone, which carry no reference or correction: the names must agree all the same.
    names = sorted(set(distributed.gather_lists(sorted(sums))))
    mine = torch.stack([torch.as_tensor(sums.get(name, 0.0), dtype=torch.float64, device=device) for name in names])
    means = distributed.sum_over_ranks(mine) / update.num_tokens
    worst = max(distributed.gather_lists([float(largest_diff)]))
    counts = {"tokens": float(update.num_tokens), "turns": float(update.num_turns)}
    return dict(zip(names, means.tolist(), strict=True)) | {"logprob_diff_max": worst} | counts
