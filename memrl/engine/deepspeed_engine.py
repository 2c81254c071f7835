"""The policy under DeepSpeed: partitioned weights, gradients and optimizer state, and whole copies of the weights out of it."""

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from memrl.config import EngineOptions, OptimOptions
from memrl.engine import distributed
from memrl.engine.deepspeed_files import TAG, save_deepspeed
from memrl.model.lora import merged_weights, save_adapter

REDUCE_BUCKET = 50_000_000  # gradients that are sent together; DeepSpeed's own 500 million are most of a small model
SUB_GROUP = 50_000_000  # weights that AdamW steps together, on a flat copy of their gradients; DeepSpeed's own: a billion
NEVER = 1_000_000_000  # steps between DeepSpeed's own progress lines; the run prints its own


class Engine:
    """One optimizer step is any number of `backward` calls and one `step`."""

    def __init__(self, model: nn.Module, optim: OptimOptions, options: EngineOptions, total_updates: int):
        """
        Args:
            model: a Transformer. Parameters that need no gradient are left alone; see `memrl/model/lora.py`.
            total_updates: optimizer steps of the whole run, which the rate's schedule is stretched over.
        """
        deepspeed = import_deepspeed()
        self._deepspeed = deepspeed
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._is_partly_frozen = len(trained) < len(list(model.parameters()))
        # Fused: the other implementations hold up to three more copies of the weights while they step.
        optimizer = torch.optim.AdamW(
            trained, lr=optim.lr, betas=(optim.beta1, optim.beta2), weight_decay=optim.weight_decay, fused=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: learning_rate_factor(update, total_updates, optim))
        self.engine, _, _, self.schedule = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=schedule,
            config=deepspeed_config(model.dtype, optim, options),
        )

    def __call__(self, *args, **kwargs):
        return self.engine(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The policy itself; under ZeRO-3 its weights are gathered layer by layer as it runs, so all ranks run it together."""
        return self.engine.module

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Add this rank's gradient of `loss`; the step's gradient is the sum over micro-batches and ranks."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        # DeepSpeed averages gradients over ranks; the loss already has its global denominator, so the average is undone here.
        self.engine.backward(loss * distributed.world_size(), scale_wrt_gas=False)

    def step(self) -> tuple[float, float]:
        """Clip, update, advance the schedule; returns the gradient's norm before clipping and the rate that was used."""
        learning_rate = self.schedule.get_last_lr()[0]
        self.engine.step()
        return float(self.engine.get_global_grad_norm()), learning_rate

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of the current weights, adapters merged, one at a time; collective over ranks.

        A tensor is only good until the next one is asked for.
        """
        return merged_weights(self.module, self._gathered)

    @torch.no_grad()
    def copy_weights_to(self, replica: nn.Module) -> None:
        """Write the current weights into a plain model, one tensor at a time; collective over ranks."""
        targets = dict(replica.named_parameters())
        for name, value in self.weights():
            targets[name].copy_(value)

    def save_adapter(self, folder: Path, base: str | None = None) -> None:
        """Rank 0 writes the adapters in peft's format, see `memrl/model/lora.py`; collective over ranks."""
        save_adapter(self.module, folder if distributed.rank() == 0 else None, self._gathered, base)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Whole fp32 gradients of what is trained by name, between the last `backward` and `step`; collective over ranks."""
        from deepspeed.utils import safe_get_full_grad

        return {
            name: safe_get_full_grad(parameter).clone()
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        }

    def save(self, folder: Path) -> None:
        """Write what is trained and the optimizer's state; frozen weights come from the start again. Collective over ranks."""
        save_deepspeed(self.engine, folder, exclude_frozen_parameters=self._is_partly_frozen)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote on as many ranks; collective. Raises ValueError, and whatever DeepSpeed does, for damage."""
        loaded, _ = self.engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=not self._is_partly_frozen)
        if loaded is None:
            raise ValueError("files are missing")

    def close(self) -> None:
        self.engine.destroy()

    def _gathered(self, parameters: list[nn.Parameter]):
        return self._deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id"))


def learning_rate_factor(update: int, total_updates: int, optim: OptimOptions) -> float:
    """Part of the peak rate for optimizer step `update` (from 0).

    Linear warm-up from 1 / warmup_updates, then a line that would reach min_lr_ratio one step after the last.
    """
    if update < optim.warmup_updates:
        return (update + 1) / optim.warmup_updates
    progress = (update - optim.warmup_updates) / max(1, total_updates - optim.warmup_updates)
    return 1 - (1 - optim.min_lr_ratio) * min(1.0, progress)


def import_deepspeed():
    """DeepSpeed, joined to the other ranks, without its chatter and without compiling anything.

    Its first `init_distributed` on a CPU builds a shared-memory op that only tensor-parallel inference uses; without a C++
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
    """DeepSpeed's own settings. In bf16 it keeps fp32 masters and sums gradients in fp32, at every stage."""
    zero: dict = {
        "stage": options.zero_stage,
        "contiguous_gradients": True,
        "reduce_bucket_size": REDUCE_BUCKET,
        "sub_group_size": SUB_GROUP,
        "stage3_param_persistence_threshold": options.persistence_threshold,
        "overlap_comm": distributed.device().type == "cuda",
    }
    if options.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if options.offload_params:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
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
