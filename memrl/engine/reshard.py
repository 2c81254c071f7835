"""Load a checkpoint on another number of ranks than the one that wrote it.

DeepSpeed itself loads a ZeRO checkpoint only on the same number of ranks. The files hold, for each rank, flat pieces of the fp32
weights and of Adam's two moments, all divided in the same way, so DeepSpeed's function that merges the weights for an export
merges the moments too. The files are read through mmap, one parameter at a time, and each rank keeps its new piece.
"""

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memrl.engine.deepspeed_engine import Engine
from memrl.engine.deepspeed_files import TAG, only_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")


def load_resharded(engine: Engine, folder: Path) -> str:
    """Load the checkpoint in `folder`, written by any number of ranks, into a fresh engine. Collective over ranks.

    Weights (16-bit and fp32 masters), Adam's moments and step count, and the position in the learning-rate schedule come from the
    checkpoint. Parameters that are not trained keep their values.

    Returns:
        A sentence: what was restored and what was not.

    Raises:
        ValueError: a trained parameter is not in the checkpoint, or a file holds more than tensors and plain values.
    """
    with only_tensors():
        saved = _SavedCheckpoint(folder / TAG)
    trained = {name: parameter for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    masters = saved.masters()
    if missing := trained.keys() - masters.keys():
        raise ValueError(f"{min(missing)} is not in it")
    for name, parameter in trained.items():
        _set_weight(parameter, masters[name].contiguous())  # `contiguous` reads a stage 3 parameter, merged only on demand
    if saved.adam_step is not None:
        _make_adam_state(engine.engine.optimizer, saved.adam_step)
        for key in MOMENTS:
            moments = saved.moments(key)
            for name, parameter in trained.items():
                _set_moment(parameter, moments[name].contiguous(), key)
    _set_schedule(engine, saved.model_file)
    return (
        "weights, Adam's moments, the learning rate and the order of the data were carried over; not carried: equality to the "
        "last bit with a run that kept its ranks, because sums over ranks round differently"
    )


class _SavedCheckpoint:
    """The files of one DeepSpeed checkpoint, and whole tensors by parameter name from them.

    Attributes:
        model_file: contents of rank 0's model file.
        adam_step: Adam's step count; None before the first step.
    """

    def __init__(self, folder: Path):
        from deepspeed.utils import zero_to_fp32

        self._tools = zero_to_fp32
        model_files = zero_to_fp32.get_model_state_files(str(folder))
        self._models = zero_to_fp32.parse_model_states(model_files)
        self.model_file = _read(model_files[0])
        self._shards = [_read(file)["optimizer_state_dict"] for file in zero_to_fp32.get_optim_files(str(folder))]
        # DeepSpeed's stage 1 optimizer for bf16 is a class of its own, and its files do not name their stage.
        self._stage = int(self._shards[0].get("zero_stage", 1))
        if self._stage == 3:
            self._flat = [shard["fp32_flat_groups"] for shard in self._shards]
            self._adam = [shard["optimizer_state_dict"]["state"] for shard in self._shards]
        else:
            self._flat = [shard["single_partition_of_fp32_groups"] for shard in self._shards]
            self._adam = [shard["base_optimizer_state"]["state"] for shard in self._shards]
        self.adam_step: Tensor | None = self._adam[0][0]["step"] if self._adam[0] else None

    def masters(self) -> Mapping[str, Tensor]:
        return self._merge(self._flat)

    def moments(self, key: str) -> Mapping[str, Tensor]:
        # The masters are stored without the padding at a rank's end, the moments with it.
        return self._merge(
            [
                [state[group][key][: len(flat)] for group, flat in enumerate(groups)]
                for state, groups in zip(self._adam, self._flat, strict=True)
            ]
        )

    def _merge(self, flat_groups: list[list[Tensor]]) -> Mapping[str, Tensor]:
        """Whole parameters from the ranks' flat pieces; those of stage 3 are merged when they are read."""
        merged: dict[str, Tensor] = {}
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            if self._stage == 3:
                self._tools._zero3_merge_trainable_params(merged, len(self._shards), flat_groups, self._models)
            else:
                paddings = self._shards[0].get("param_alignment_paddings")
                self._tools._zero2_merge_trainable_params(merged, len(self._shards), flat_groups, self._models, paddings)
        return merged


def _read(file: str) -> dict:
    return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def _set_weight(parameter: torch.nn.Parameter, value: Tensor) -> None:
    """Set the weight and its fp32 master: two copies, which DeepSpeed synchronises in optimizer steps only."""
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    is_partitioned = hasattr(parameter, "ds_id")
    with torch.no_grad(), deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=is_partitioned):
        parameter.copy_(value)
    if is_partitioned:
        safe_set_local_fp32_param(parameter, _own_piece(parameter, value))
    else:
        safe_set_full_fp32_param(parameter, value)


def _set_moment(parameter: torch.nn.Parameter, value: Tensor, key: str) -> None:
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    if hasattr(parameter, "ds_id"):
        safe_set_local_optimizer_state(parameter, _own_piece(parameter, value), key)
    else:
        safe_set_full_optimizer_state(parameter, value, key)


def _own_piece(parameter: Any, value: Tensor) -> Tensor:
    """This rank's part of a stage 3 parameter: [ceil(numel / ranks)], padded with zeros on the last rank.

    Args:
        parameter: an nn.Parameter with the attributes that DeepSpeed adds to it.
    """
    from deepspeed import comm

    size = parameter.ds_tensor.numel()
    piece = value.flatten().float()[size * comm.get_rank(parameter.ds_process_group) :][:size]
    return F.pad(piece, (0, size - len(piece)))


def _make_adam_state(optimizer: Any, step: Tensor) -> None:
    """Create the state of torch's AdamW, which otherwise makes it in its first step.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer, a different class for each stage.
    """
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    [flat] = [getattr(optimizer, name) for name in names if hasattr(optimizer, name)]
    for group in flat:
        moments = {key: torch.zeros_like(group) for key in MOMENTS}
        optimizer.optimizer.state[group] = {"step": step.to(group.device, copy=True)} | moments
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._lazy_init_hp_params_optimizer_state()


def _set_schedule(engine: Engine, model_file: dict) -> None:
    engine.schedule.load_state_dict(model_file["lr_scheduler"])
    zero = engine.engine
    zero.global_steps, zero.skipped_steps = model_file["global_steps"], model_file["skipped_steps"]
    for group, rate in zip(zero.optimizer.param_groups, engine.schedule.get_last_lr(), strict=True):
        group["lr"] = rate
