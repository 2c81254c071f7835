"""The models that a run starts with, read from a Hugging Face folder: the policy to train and the replica to sample with."""

from pathlib import Path

import torch
from torch import nn

from memrl.config import TrainConfig
from memrl.engine import distributed
from memrl.engine.deepspeed_engine import deepspeed_config, import_deepspeed
from memrl.model import Transformer, load_model
from memrl.model.loader import empty_model
from memrl.model.lora import add_adapters
from memrl.model.saver import EMBEDDING, OUTPUT
from memrl.model.weights import StoredTensor, WeightReader


def load_policy(folder: str | Path, config: TrainConfig, device: torch.device | str) -> Transformer:
    """The model to hand to `Engine`, in training mode, with adapters where `model.lora_rank` asks for them.

    Under ZeRO-3 with more than one rank each holds its own part from the beginning: a tensor is read by rank 0, sent to all, and
    cut, before the next. At no moment is there more than one whole tensor besides the parts. Otherwise each rank reads the whole
    model. Collective over ranks.

    Raises CheckpointError (a ValueError): one line that names the file or tensor at fault and the fix.
    """
    if config.engine.zero_stage == 3 and distributed.world_size() > 1:
        model = _load_partitioned(folder, config, device)
    else:
        model = load_model(folder, config.model.dtype, device)
    if config.model.lora_rank:
        add_adapters(model, config.model.lora_rank, config.model.lora_alpha, config.seed)
    model.checkpoint_layers = config.model.checkpoint_layers
    return model.train()


def load_replica(folder: str | Path, config: TrainConfig, device: torch.device | str) -> Transformer:
    """A plain, frozen, whole copy of the start in evaluation mode: what each rank samples with.

    Raises CheckpointError (a ValueError), as `load_policy`.
    """
    return load_model(folder, config.model.dtype, device).requires_grad_(False)


def _load_partitioned(folder: str | Path, config: TrainConfig, device: torch.device | str) -> Transformer:
    deepspeed = import_deepspeed()
    model, stored = empty_model(folder, config.model.dtype)
    settings = deepspeed_config(model.dtype, config.optim, config.engine)
    reader = WeightReader()
    for name, module in model.named_modules():
        names = [f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)]
        if not names or (model.config.tie_word_embeddings and names == [OUTPUT]):
            continue
        for own in names:
            setattr(module, own.rpartition(".")[2], nn.Parameter(_read_on_rank_0(own, model, stored, reader, device)))
        # Sends rank 0's tensors to all ranks and leaves each with its part. No `dtype`: DeepSpeed 0.19 takes float32 there for
        # bfloat16 on a CPU; the settings and the tensors say it already.
        deepspeed.zero.Init(module=module, config_dict_or_path=settings)
    model.tie_weights()
    return model


def _read_on_rank_0(
    name: str, model: Transformer, stored: dict[str, StoredTensor], reader: WeightReader, device: torch.device | str
) -> torch.Tensor:
    # A tied model may store its one matrix under either name; that two stored ones agree is checked as the replica is loaded.
    found = stored.get(name) or stored[OUTPUT if name == EMBEDDING else name]
    if distributed.rank() == 0:
        return reader.read(found, model.dtype, device)
    return torch.empty(found.shape, dtype=model.dtype, device=device)
