"""Load the policy to train from a Hugging Face folder, partitioned over ranks under ZeRO-3."""

from pathlib import Path

import torch
from torch import nn

from memrl.config import EngineOptions, ModelOptions, OptimOptions
from memrl.engine import distributed
from memrl.engine.deepspeed_engine import deepspeed_config, import_deepspeed
from memrl.model import Transformer, load_model
from memrl.model.loader import empty_model
from memrl.model.lora import add_adapters
from memrl.model.saver import EMBEDDING, OUTPUT
from memrl.model.weights import StoredTensor, WeightReader


def load_policy(
    folder: str | Path,
    model_options: ModelOptions,
    optim: OptimOptions,
    engine: EngineOptions,
    seed: int,
    device: torch.device | str,
) -> Transformer:
    """The model for `Engine`, in training mode, with adapters if `lora_rank` is set. Collective over ranks.

    Under ZeRO-3 with more than one rank, rank 0 reads one tensor after the other and sends it to all, and each rank keeps its
    part: no rank ever holds more than its parts and one whole tensor. Otherwise each rank reads the whole model.

    Args:
        seed: of the adapters' initial weights.

    Raises:
        CheckpointError: a ValueError in one line that names the file or tensor at fault and the fix.
    """
    if engine.zero_stage == 3 and distributed.world_size() > 1:
        model = _load_partitioned(folder, model_options.dtype, optim, engine, device)
    else:
        model = load_model(folder, model_options.dtype, device)
    if model_options.lora_rank:
        add_adapters(model, model_options.lora_rank, model_options.lora_alpha, seed)
    model.checkpoint_layers = model_options.checkpoint_layers
    return model.train()


def _load_partitioned(
    folder: str | Path, dtype: str, optim: OptimOptions, engine: EngineOptions, device: torch.device | str
) -> Transformer:
    deepspeed = import_deepspeed()
    model, stored = empty_model(folder, dtype)
    settings = deepspeed_config(model.dtype, optim, engine)
    reader = WeightReader()
    for module_name, module in model.named_modules():
        names = [f"{module_name}.{name}" for name, _ in module.named_parameters(recurse=False)]
        if not names or (model.config.tie_word_embeddings and names == [OUTPUT]):
            continue
        for name in names:
            value = _read_on_rank_0(name, model, stored, reader, device)
            setattr(module, name.rpartition(".")[2], nn.Parameter(value))
        # Sends rank 0's tensors to all ranks and leaves each with its part. No `dtype` argument: DeepSpeed 0.19 would take
        # float32 for bfloat16 on a CPU; the settings and the tensors already define it.
        deepspeed.zero.Init(module=module, config_dict_or_path=settings)
    model.tie_weights()
    return model


def _read_on_rank_0(
    name: str, model: Transformer, stored: dict[str, StoredTensor], reader: WeightReader, device: torch.device | str
) -> torch.Tensor:
    # A tied model may store its one matrix under either name; if it stores both, loading the replica checks that they agree.
    found = stored.get(name) or stored[OUTPUT if name == EMBEDDING else name]
    if distributed.rank() == 0:
        return reader.read(found, model.dtype, device)
    return torch.empty(found.shape, dtype=model.dtype, device=device)
