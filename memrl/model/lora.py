"""Low-rank adapters (LoRA, arXiv 2106.09685): small trained matrices beside linear layers whose own weights stay as they are.

    y = W x + b + (alpha / rank) B A x        A [rank, in], B [out, rank]; eq. 3 of the paper

B starts at zero, so a fresh adapter changes nothing. The weights keep the names that they have without adapters, and the
adapters' names are the layer's with `.lora_A` and `.lora_B`.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from memrl.model.transformer import Transformer
from memrl.utils.files import sync_path, write_whole

# Makes parameters whole for the length of a `with` block, where ranks hold parts of them.
Gather = Callable[[list[nn.Parameter]], AbstractContextManager]


def _already_whole(parameters: list[nn.Parameter]) -> AbstractContextManager:
    return nullcontext()


class LoraLinear(nn.Module):
    """A linear layer with an adapter; takes over the layer's parameters. Input [..., in], output [..., out]."""

    # No subclass of nn.Linear: whatever rearranges the weights of those would lose the adapter without a word.
    def __init__(self, linear: nn.Linear, rank: int, alpha: float, generator: torch.Generator):
        super().__init__()
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        # Uniform within 1 / sqrt(in), peft's start: Kaiming's with a = sqrt(5), bound = sqrt(6 / ((1 + a^2) in)).
        # Drawn in fp32 on the CPU, so that the start depends neither on the device nor, but for rounding, on the type.
        bound = 1 / math.sqrt(linear.in_features)
        start = torch.empty(rank, linear.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(start.to(self.weight.device, self.weight.dtype))
        self.lora_B = nn.Parameter(self.weight.new_zeros(linear.out_features, rank))
        self.rank, self.alpha, self.enabled = rank, alpha, True

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if self.enabled:
            y = y + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)
        return y

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """W + (alpha / rank) B A in W's type, [out, in]; summed in fp32 and rounded once."""
        return torch.addmm(self.weight.float(), self.lora_B.float(), self.lora_A.float(), alpha=self.scale).to(self.weight.dtype)


def add_adapters(model: Transformer, rank: int, alpha: float, seed: int) -> None:
    """Put an adapter beside every linear layer of attention and feed-forward, in place, and freeze everything else.

    The embedding and the output layer get none. A model whose weights are partitioned (ZeRO-3) will do; the adapters are whole on
    each rank, the same on all, until DeepSpeed takes the model.

    Args:
        rank: rows of A and columns of B.
        alpha: the adapters' output is multiplied by alpha / rank.
        seed: A is a function of it and the model's shape alone.

    Raises:
        ValueError: the model has adapters already.
    """
    if _adapted(model):
        raise ValueError("the model has adapters already; merge them first, or load the model anew")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, LoraLinear(child, rank, alpha, generator))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapters' contribution: exactly its base. Not to be left between a forward pass and its backward
    where layers are recomputed, for they are recomputed as the model is then."""
    layers = [module for _, module in _adapted(model)]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def merged_weights(model: nn.Module, gathered: Gather = _already_whole) -> Iterator[tuple[str, Tensor]]:
    """Every weight under the name that it has without adapters, adapters merged, one at a time; tied ones come once.

    In bf16 a merged weight is rounded to bf16, so the merged model differs from the adapted one by that rounding.

    Args:
        gathered: makes the given parameters whole where ranks hold parts of them. All ranks then iterate together.

    Yields:
        (name, tensor); the tensor is only good until the next one is asked for.
    """
    layers = {id(module.weight): module for _, module in _adapted(model)}
    adapters = {id(parameter) for module in layers.values() for parameter in (module.lora_A, module.lora_B)}
    for name, parameter in model.named_parameters():
        if id(parameter) in adapters:
            continue
        layer = layers.get(id(parameter))
        if layer is None:
            with gathered([parameter]):
                yield name, parameter.detach()
        else:
            with gathered([parameter, layer.lora_A, layer.lora_B]):
                yield name, layer.merged_weight()


def save_adapter(model: nn.Module, folder: Path | None, gathered: Gather = _already_whole, base: str | None = None) -> None:
    """Write the adapters alone, as peft's `PeftModel.from_pretrained` reads them: adapter_model.safetensors, adapter_config.json.

    Args:
        folder: made if need be; None on ranks that only take part in the gathering.
        gathered: as for `merged_weights`.
        base: path or name of the base model, for peft's record.

    Raises:
        ValueError: the model has no adapters.
    """
    layers = _adapted(model)
    if not layers:
        raise ValueError("the model has no adapters to save; set model.lora_rank, or save the whole model")
    tensors: dict[str, Tensor] = {}
    for name, layer in layers:
        with gathered([layer.lora_A, layer.lora_B]):
            if folder is not None:
                for part in ("lora_A", "lora_B"):
                    value = getattr(layer, part).detach()
                    tensors[f"base_model.model.{name}.{part}.weight"] = value.to("cpu", copy=True).contiguous()
    if folder is not None:
        _write(folder, tensors, _peft_config(layers, base))


def _adapted(model: nn.Module) -> list[tuple[str, LoraLinear]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear)]


def _peft_config(layers: list[tuple[str, LoraLinear]], base: str | None) -> dict:
    layer = layers[0][1]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": layer.rank,
        "lora_alpha": layer.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name, _ in layers}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }


def _write(folder: Path, tensors: dict[str, Tensor], config: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    target, fresh = folder / "adapter_model.safetensors", folder / ".adapter_model.safetensors.new"
    save_file(tensors, fresh, metadata={"format": "pt"})
    sync_path(fresh)
    os.replace(fresh, target)
    write_whole(folder / "adapter_config.json", json.dumps(config, indent=2) + "\n")
