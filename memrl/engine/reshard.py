"""Take up a checkpoint on another number of ranks.

DeepSpeed loads a ZeRO checkpoint on as many ranks as wrote it. Its files hold, per rank, flat pieces of the fp32 weights and of
Adam's two moments, all cut in the same way, so what puts the weights together for an export puts the moments together too. They
are read through mmap, one parameter at a time, and each rank keeps its new piece.
"""

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from memrl.engine.deepspeed_engine import Engine
from memrl.engine.deepspeed_files import TAG

MOMENTS = ("exp_avg", "exp_avg_sq")


def load_resharded(engine: Engine, folder: Path) -> str:
    """Load the checkpoint in `folder`, written by any number of ranks, into a fresh engine. Collective over ranks.

    Weights (16-bit and fp32 masters), Adam's moments and step count, and the place in the learning-rate schedule come from the
    checkpoint. Parameters that are not trained stay what they are.

    Returns:
        What was carried and what was not, in words.

    Raises:
        ValueError: a trained parameter is not in the checkpoint.
    """
    saved = _Saved(folder / TAG)
    zero = engine.engine
    trained = {name: parameter for name, parameter in zero.module.named_parameters() if parameter.requires_grad}
    masters = saved.masters()
    if missing := trained.keys() - masters.keys():
        raise ValueError(f"{min(missing)} is not in it")
    for name, parameter in trained.items():
        _set_weight(engine, parameter, _whole(masters[name]))
    adam_step = saved.adam_step()
    if adam_step is not None:
        _make_adam_state(zero, adam_step)
        for key in MOMENTS:
            moments = saved.moments(key)
            for name, parameter in trained.items():
                _set_moment(parameter, _whole(moments[name]), key)
    _set_schedule(engine, saved.model_file)
    return (
        "weights, Adam's moments, the learning rate and the order of the data were carried over; not carried: equality to the "
        "last bit with a run that kept its ranks, because sums over ranks round differently"
    )


class _Saved:
    """The files of one DeepSpeed checkpoint, whole parameters by name out of them."""

    def __init__(self, folder: Path):
        from deepspeed.utils import zero_to_fp32

        self._tools = zero_to_fp32
        model_files = zero_to_fp32.get_model_state_files(str(folder))
        self._models = zero_to_fp32.parse_model_states(model_files)
        self.model_file = _read(model_files[0])
        shards = [_read(file)["optimizer_state_dict"] for file in zero_to_fp32.get_optim_files(str(folder))]
        # DeepSpeed's optimizer for stage 1 in bf16 is a class of its own, whose files do not name their stage.
        self._stage = int(shards[0].get("zero_stage", 1))
        self._shards = shards
        if self._stage == 3:
            self._flat = [shard["fp32_flat_groups"] for shard in shards]
            self._adam = [shard["optimizer_state_dict"]["state"] for shard in shards]
        else:
            self._flat = [shard["single_partition_of_fp32_groups"] for shard in shards]
            self._adam = [shard["base_optimizer_state"]["state"] for shard in shards]

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

    def adam_step(self) -> Tensor | None:
        """Adam's count of steps; None before the first."""
        return self._adam[0][0]["step"] if self._adam[0] else None

    def _merge(self, flat_groups: list[list[Tensor]]) -> Mapping[str, Tensor]:
        """Whole parameters from the ranks' flat pieces of whatever is cut as the masters are; stage 3's are put together late."""
        merged: dict[str, Tensor] = {}
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            if self._stage == 3:
                self._tools._zero3_merge_trainable_params(merged, len(self._shards), flat_groups, self._models)
            else:
                paddings = self._shards[0].get("param_alignment_paddings")
                self._tools._zero2_merge_trainable_params(merged, len(self._shards), flat_groups, self._models, paddings)
        return merged


def _read(file: str) -> dict:
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.contiguous()  # DeepSpeed's stand-in for a stage 3 parameter becomes a tensor here


def _set_weight(engine: Engine, parameter: torch.nn.Parameter, value: Tensor) -> None:
    """Masters and weights are two copies, and DeepSpeed keeps neither in step with the other outside of an optimizer step."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    if hasattr(parameter, "ds_id"):
        import deepspeed

        with torch.no_grad(), deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(value)
        safe_set_local_fp32_param(parameter, _own_piece(parameter, value))
    else:
        with torch.no_grad():
            parameter.copy_(value)
        safe_set_full_fp32_param(parameter, value)


def _set_moment(parameter: torch.nn.Parameter, value: Tensor, key: str) -> None:
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    if hasattr(parameter, "ds_id"):
        safe_set_local_optimizer_state(parameter, _own_piece(parameter, value), key)
    else:
        safe_set_full_optimizer_state(parameter, value, key)


def _own_piece(parameter: torch.nn.Parameter, value: Tensor) -> Tensor:
    """This rank's part of a stage 3 parameter: [ceil(numel / ranks)], zeros where the last rank's goes beyond the end."""
    from deepspeed import comm

    size = parameter.ds_tensor.numel()
    piece = torch.zeros(size, dtype=torch.float32)
    own = value.flatten()[size * comm.get_rank(parameter.ds_process_group) :][:size]
    piece[: len(own)] = own
    return piece


def _make_adam_state(zero, step: Tensor) -> None:
    """torch's AdamW makes its state in its first step; loading wants it before."""
    optimizer = zero.optimizer
    base = optimizer.optimizer
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    [flat] = [getattr(optimizer, name) for name in names if hasattr(optimizer, name)]
    for group in flat:
        base.state[group] = {"step": step.to(group.device, copy=True)} | {key: torch.zeros_like(group) for key in MOMENTS}
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._lazy_init_hp_params_optimizer_state()


def _set_schedule(engine: Engine, model_file: dict) -> None:
    engine.schedule.load_state_dict(model_file["lr_scheduler"])
    zero = engine.engine
    zero.global_steps, zero.skipped_steps = model_file["global_steps"], model_file["skipped_steps"]
    for group, rate in zip(zero.optimizer.param_groups, engine.schedule.get_last_lr(), strict=True):
        group["lr"] = rate
