"""The policy under DeepSpeed: weights, gradients and optimizer state partitioned over ranks, and whole copies of the weights."""

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from memrl.config import EngineOptions, OptimOptions
from memrl.engine import distributed
from memrl.engine.deepspeed_files import TAG, only_tensors, save_deepspeed
from memrl.model import Transformer
from memrl.model.lora import merged_weights, save_adapter

REDUCE_BUCKET = 50_000_000  # gradients that are sent together; DeepSpeed's default, 500 million, is most of a small model
SUB_GROUP = 50_000_000  # weights that AdamW steps together, on a flat copy of their gradients; DeepSpeed's default: a billion
NEVER = 1_000_000_000  # steps between DeepSpeed's progress lines; the run prints its own


class Engine:
    """One optimizer step is any number of `backward` calls and one `step`."""

    def __init__(self, model: Transformer, optim: OptimOptions, options: EngineOptions, total_updates: int):
        """
        Args:
            model: only parameters that need a gradient are trained; see `memrl/model/lora.py`.
            total_updates: optimizer steps that the whole run has planned: the length of the learning-rate schedule.
        """
        deepspeed = import_deepspeed()
        self._gathered_parameters = deepspeed.zero.GatheredParameters
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._is_partly_frozen = len(trained) < len(list(model.parameters()))
        # Fused: the other implementations need up to three more copies of the weights during a step.
        optimizer = torch.optim.AdamW(
            trained, lr=optim.lr, betas=(optim.beta1, optim.beta2), weight_decay=optim.weight_decay, fused=True
        )
        self._set_schedule(optimizer, total_updates, optim)
        # Any: DeepSpeed's annotations lack most attributes of its engine and optimizers.
        self.engine: Any = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=self.schedule,
            config=deepspeed_config(model.dtype, optim, options),
        )[0]

    def _set_schedule(self, optimizer: torch.optim.Optimizer, total_updates: int, optim: OptimOptions) -> None:
        """`schedule` counts the steps that were done, and is saved with the optimizer; `step` sets the rate."""
        self._learning_rate = lambda done, planned: optim.lr * learning_rate_factor(done, planned, total_updates, optim)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda done: learning_rate_factor(done, done, total_updates, optim)
        )

    def __call__(self, *args, **kwargs):
        return self.engine(*args, **kwargs)

    @property
    def module(self) -> Transformer:
        """The policy. Under ZeRO-3 its forward pass gathers the weights layer by layer, so all ranks must run it together."""
        return self.engine.module

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Add the gradient of `loss` on this rank; the step's gradient is the sum over micro-batches and ranks."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        # DeepSpeed averages gradients over ranks. The loss already has its global denominator, so the average is undone.
        self.engine.backward(loss * distributed.world_size(), scale_wrt_gas=False)

    def step(self, planned: int | None = None) -> tuple[float, float]:
        """Clip, update, advance the schedule; returns the gradient's norm before clipping and the learning rate of this step.

        Args:
            planned: steps that were planned before this one; None: those that were done.
        """
        done = self.schedule.last_epoch
        learning_rate = self._learning_rate(done, done if planned is None else planned)
        for group in self.schedule.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        return float(self.engine.get_global_grad_norm()), learning_rate

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of the current weights, adapters merged, one at a time; collective over ranks.

        A tensor is valid only until the iterator advances.
        """
        return merged_weights(self.module, self._gathered)

    @torch.no_grad()
    def copy_weights_to(self, replica: nn.Module) -> None:
        """Copy the current weights into a plain model, one tensor at a time; collective over ranks."""
        targets = dict(replica.named_parameters())
        for name, value in self.weights():
            targets[name].copy_(value)

    def save_adapter(self, folder: Path, base: str | None = None) -> None:
        """Rank 0 writes the adapters in peft's format, see `memrl/model/lora.py`; collective over ranks."""
        save_adapter(self.module, folder if distributed.rank() == 0 else None, self._gathered, base)

    def save(self, folder: Path) -> list[Path]:
        """Write the trained weights and the optimizer's state, without frozen weights; returns this rank's files. Collective."""
        return save_deepspeed(self.engine, folder, exclude_frozen_parameters=self._is_partly_frozen)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote on the same number of ranks. Collective.

        Raises:
            ValueError: files are missing, or hold more than tensors and plain values.
        """
        with only_tensors():
            loaded, _ = self.engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=not self._is_partly_frozen)
        if loaded is None:
            raise ValueError("files are missing")

    def close(self) -> None:
        self.engine.destroy()

    def _gathered(self, parameters: list[nn.Parameter]):
        return self._gathered_parameters(parameters, enabled=hasattr(parameters[0], "ds_id"))


def learning_rate_factor(done: int, planned: int, total_updates: int, optim: OptimOptions) -> float:
    """The learning rate of an optimizer step, as a fraction of the peak.

    Linear warm-up from 1 / warmup_updates, then a line that would reach min_lr_ratio one step after the last. The warm-up counts
    the steps that were done, because it is there for Adam's moments. The line counts the planned ones, so that it ends with the
    run: steps that have no token, or whose gradient is not finite, are not done.

    Args:
        done, planned: optimizer steps before this one, of `total_updates` that are planned.
    """
    progress = (planned - optim.warmup_updates) / max(1, total_updates - optim.warmup_updates)
    line = 1 - (1 - optim.min_lr_ratio) * min(1.0, max(0.0, progress))
    return min(line, (done + 1) / optim.warmup_updates) if done < optim.warmup_updates else line


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed and connect it to the other ranks, without its progress messages and without compiling anything.

    On a CPU its first `init_distributed` compiles a shared-memory op that only tensor-parallel inference uses; without a C++
    compiler that would end the run.
    """
    if distributed.device().type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="deepspeed")
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed(dist_init_required=False)
    return deepspeed


def deepspeed_config(dtype: torch.dtype, optim: OptimOptions, options: EngineOptions) -> dict:
    """DeepSpeed's settings. In bf16 it keeps fp32 master weights and sums gradients in fp32, at every ZeRO stage."""
    zero: dict = {
        "stage": options.zero_stage,
        "contiguous_gradients": True,
        "reduce_bucket_size": REDUCE_BUCKET,
        "sub_group_size": SUB_GROUP,
        "stage3_param_persistence_threshold": options.persistence_threshold,
        "overlap_comm": distributed.device().type == "cuda",
    }
    offloaded = {"offload_optimizer": options.offload_optimizer, "offload_param": options.offload_params}
    zero |= {name: {"device": "cpu", "pin_memory": True} for name, is_offloaded in offloaded.items() if is_offloaded}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optim.grad_clip,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": NEVER,
    }
