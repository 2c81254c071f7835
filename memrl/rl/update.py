"""One optimizer step on a set of training turns."""

import torch
from torch import nn

from kernels import AttentionBackend
from memrl.config import RLOptions
from memrl.model.attention import PackedContext
from memrl.rl import distributed
from memrl.rl.engine import Engine
from memrl.rl.loss import policy_loss
from memrl.rl.packing import MicroBatch, TrainTurn, empty_micro_batch, pack_turns, share_out


def accumulate_gradients(
    engine: Engine,
    reference: nn.Module | None,
    turns: list[TrainTurn],
    rl: RLOptions,
    temperature: float,
    attention: AttentionBackend | None = None,
) -> dict[str, float] | None:
    """Forward and backward over all ranks' turns; the gradient is that of the token mean.

    Args:
        turns: those that this rank sampled. Who computes on them is decided here, by size: the ranks' shares of one optimizer
            step can be very unequal, and the gradient does not depend on the cut.

    Returns:
        Token means over all ranks by metric name, "logprob_diff_max" and "tokens" (their number); None when no rank has a
        token, so that there is nothing to step on.
    """
    batches = pack_turns(balanced_share(turns), rl.micro_batch_tokens)
    num_tokens = int(distributed.sum_over_ranks(torch.tensor([sum(b.num_tokens for b in batches)])))
    if num_tokens == 0:
        return None
    count = distributed.max_over_ranks(len(batches))
    batches += [empty_micro_batch()] * (count - len(batches))
    sums: dict[str, torch.Tensor] = {}
    largest_diff = torch.zeros((), device=distributed.device())
    for index, batch in enumerate(batches):
        batch = batch.to(distributed.device())
        context = PackedContext(batch.seq_lens, distributed.device(), attention)
        logprobs, entropy = engine(batch.ids, context, batch.select, batch.targets, temperature)
        loss, metrics = policy_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            reference_logprobs(reference, batch, context, temperature),
            num_tokens=num_tokens,
            clip_low=rl.clip_low,
            clip_high=rl.clip_high,
            dual_clip=rl.dual_clip,
            kl_coef=rl.kl_coef,
        )
        engine.backward(loss, is_last=index == count - 1)
        diff = (logprobs.detach() - batch.old_logprobs).abs()
        metrics |= {"entropy": entropy.sum(), "logprob_diff": diff.sum()}
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value.double()
        if len(diff):
            largest_diff = torch.maximum(largest_diff, diff.max())
    means = distributed.sum_over_ranks(torch.stack(list(sums.values()))) / num_tokens
    worst = max(distributed.gather_lists([float(largest_diff)]))
    return dict(zip(sums, means.tolist(), strict=True)) | {"logprob_diff_max": worst, "tokens": float(num_tokens)}


def balanced_share(turns: list[TrainTurn]) -> list[TrainTurn]:
    """This rank's part of all ranks' turns, nearly the same number of tokens on each rank; collective."""
    if distributed.world_size() == 1:
        return turns
    everyone = distributed.gather_lists(turns)
    parts = share_out([turn.num_inputs for turn in everyone], distributed.world_size())
    return [turn for turn, part in zip(everyone, parts, strict=True) if part == distributed.rank()]


@torch.no_grad()
def reference_logprobs(
    reference: nn.Module | None, batch: MicroBatch, context: PackedContext, temperature: float
) -> torch.Tensor | None:
    """The frozen start's log-probabilities of the batch's targets, fp32 [N]; None without a reference."""
    if reference is None:
        return None
    return reference(batch.ids, context, batch.select, batch.targets, temperature)[0]
