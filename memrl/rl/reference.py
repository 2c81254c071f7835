"""The frozen reference model: the policy at the start of training, for the penalty `rl.kl_coef`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn

from memrl.config import ModelOptions, RLOptions
from memrl.engine.deepspeed_engine import Engine
from memrl.model import PackedContext, load_model
from memrl.model.lora import adapters_off
from memrl.rl.packing import MicroBatch


class Reference:
    """A frozen model that stays on the device."""

    def __init__(self, model: nn.Module):
        self.model = model

    def ready(self) -> AbstractContextManager:
        """Call `logprobs` only within this block; enter it once a step."""
        return nullcontext()

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, context: PackedContext, temperature: float) -> torch.Tensor:
        """log p(target) under the reference at the given temperature, fp32 [N]; the batch is on the device."""
        return self.model(batch.ids, context, batch.select, batch.targets, temperature)[0]


class OffloadedReference(Reference):
    """Weights that stay in CPU memory and are copied into the replica while they are used.

    The replica is idle during an update and receives the policy's weights after it anyway, so the device never holds two whole
    models.
    """

    def __init__(self, frozen: nn.Module, replica: nn.Module):
        """
        Args:
            frozen: the reference, in CPU memory.
            replica: a model of the same shape on the device.
        """
        super().__init__(replica)
        self.frozen = frozen

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The replica is overwritten: sample from it again only after `Engine.copy_weights_to(replica)`."""
        targets = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in self.frozen.named_parameters():
                targets[name].copy_(value)
        yield


class BaseReference(Reference):
    """The policy with its adapters switched off, without a copy. Under ZeRO-3 all ranks must call `logprobs` equally often."""

    def logprobs(self, batch: MicroBatch, context: PackedContext, temperature: float) -> torch.Tensor:
        with adapters_off(self.model):
            return super().logprobs(batch, context, temperature)


def make_reference(
    rl: RLOptions, model: ModelOptions, start: Path, replica: nn.Module, engine: Engine, device: torch.device | str
) -> Reference | None:
    """The reference that the settings need; None without a penalty.

    Args:
        start: Hugging Face folder of the policy's initial weights. They are read from it again, so a resumed run has the same
            reference.
        replica: the model that this rank samples from.
    """
    if rl.kl_coef == 0:
        return None
    if model.lora_rank:
        return BaseReference(engine.module)
    if rl.reference == "cpu":
        return OffloadedReference(load_model(start, model.dtype, "cpu"), replica)
    return Reference(load_model(start, model.dtype, device).requires_grad_(False))
