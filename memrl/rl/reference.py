"""The frozen start, which the penalty `rl.kl_coef` pulls the policy back to."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn

from memrl.config import TrainConfig
from memrl.engine.deepspeed_engine import Engine
from memrl.model import PackedContext, load_model
from memrl.model.lora import adapters_off
from memrl.rl.packing import MicroBatch


class Reference:
    """A frozen model on the device."""

    def __init__(self, model: nn.Module):
        self.model = model

    def ready(self) -> AbstractContextManager:
        """`logprobs` may be called within this block alone; one block a step is meant."""
        return nullcontext()

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, context: PackedContext, temperature: float) -> torch.Tensor:
        """log p(target) of the frozen start at the given temperature, fp32 [N], for the N targets of a batch on the device."""
        return self.model(batch.ids, context, batch.select, batch.targets, temperature)[0]


class BorrowingReference(Reference):
    """Weights that wait in CPU memory and take the replica's place on the device while they are used.

    The replica is idle during an update, and gets the policy's weights after it in any case. So the device never holds two whole
    copies.
    """

    def __init__(self, start: nn.Module, replica: nn.Module):
        """
        Args:
            start: the frozen start, in CPU memory.
            replica: a model of the same shape on the device.
        """
        super().__init__(replica)
        self.start = start

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Nothing may be sampled from the replica in this block, nor after it before `Engine.copy_weights_to(replica)`."""
        targets = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in self.start.named_parameters():
                targets[name].copy_(value)
        yield


class BaseReference(Reference):
    """The policy without its adapters: no copy at all. Under ZeRO-3 all ranks call `logprobs` together, equally often."""

    def logprobs(self, batch: MicroBatch, context: PackedContext, temperature: float) -> torch.Tensor:
        with adapters_off(self.model):
            return super().logprobs(batch, context, temperature)


def make_reference(
    config: TrainConfig, start: Path, replica: nn.Module, engine: Engine, device: torch.device | str
) -> Reference | None:
    """What `rl.kl_coef`, `model.lora_rank` and `rl.reference` ask for; None where there is no penalty.

    Args:
        start: Hugging Face folder of the frozen start. It is read anew, so a resumed run has the same reference.
        replica: what this rank samples with.
    """
    if config.rl.kl_coef == 0:
        return None
    if config.model.lora_rank:
        return BaseReference(engine.module)
    if config.rl.reference == "cpu":
        return BorrowingReference(load_model(start, config.model.dtype, "cpu"), replica)
    return Reference(load_model(start, config.model.dtype, device).requires_grad_(False))
