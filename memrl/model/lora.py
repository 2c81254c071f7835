"""Low-rank adapters (LoRA, arXiv 2106.09685): small trained matrices added to linear layers whose own weights are frozen.

    y = W x + b + (alpha / rank) B A x        A [rank, in], B [out, rank]; eq. 3 of the paper

B starts at zero, so a new adapter does not change the output. The weights keep their names; the adapters' names are the layer's
with `.lora_A` and `.lora_B` appended.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from memrl.model.transformer import Transformer
from memrl.utils.files import replacing, write_whole

# Gathers parameters that are partitioned over ranks, for the duration of a `with` block.
Gather = Callable[[list[nn.Parameter]], AbstractContextManager]


class LoraLinear(nn.Module):
    """A linear layer with an adapter, sharing the given layer's parameters. Input [..., in], output [..., out]."""

    bias: nn.Parameter | None

    # Not a subclass of nn.Linear: code that replaces linear layers would silently drop the adapter.
    def __init__(self, linear: nn.Linear, rank: int, alpha: float, generator: torch.Generator):
        super().__init__()
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        # Uniform within 1 / sqrt(in), as in peft: Kaiming's with a = sqrt(5), bound = sqrt(6 / ((1 + a^2) in)).
        # Drawn in fp32 on the CPU, so that it depends neither on the device nor, apart from rounding, on the dtype.
        bound = 1 / math.sqrt(linear.in_features)
        start = torch.empty(rank, linear.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(start.to(self.weight.device, self.weight.dtype))
        self.lora_B = nn.Parameter(self.weight.new_zeros(linear.out_features, rank))
        self.rank, self.alpha, self.scale, self.enabled = rank, alpha, alpha / rank, True

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if self.enabled:
            y = y + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)
        return y

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """W + (alpha / rank) B A in W's dtype, [out, in]; summed in fp32 and rounded once."""
        return torch.addmm(self.weight.float(), self.lora_B.float(), self.lora_A.float(), alpha=self.scale).to(self.weight.dtype)


def add_adapters(model: Transformer, rank: int, alpha: float, seed: int) -> None:
    """Add an adapter to every linear layer of attention and feed-forward, in place, and freeze all other weights.

    The embedding and the output layer get none. The model's weights may be partitioned (ZeRO-3); the adapters are created whole
    and equal on every rank, until DeepSpeed partitions them. The seed and the model's shape determine A. ValueError if the model
    has adapters already.
    """
    if _adapted(model):
        raise ValueError("the model has adapters already; merge them first, or load the model again")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    layers = model.model.layers
    for name, module in list(layers.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(layers.get_submodule(parent), child, LoraLinear(module, rank, alpha, generator))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters, so that the model is exactly its base.

    With activation checkpointing the backward pass must run inside as well, because it recomputes the layers.
    """
    layers = [module for _, module in _adapted(model)]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def merged_weights(model: nn.Module, gathered: Gather = nullcontext) -> Iterator[tuple[str, Tensor]]:
    """Every weight with adapters merged, one at a time, under its name without adapters; tied weights are yielded once.

    In bf16 a merged weight is rounded to bf16, so the merged model differs from the adapted one by that rounding.

    If `gathered` gathers parameters that are partitioned over ranks, all ranks have to iterate together. Each tensor is valid
    until the next iteration.
    """
    layers = {id(module.weight): module for _, module in _adapted(model)}
    adapters = {id(parameter) for module in layers.values() for parameter in (module.lora_A, module.lora_B)}
    for name, parameter in model.named_parameters():
        if id(parameter) in adapters:
            continue
        layer = layers.get(id(parameter))
        with gathered([parameter, *([layer.lora_A, layer.lora_B] if layer else [])]):
            yield name, layer.merged_weight() if layer else parameter.detach()


def save_adapter(model: nn.Module, folder: Path | None, gathered: Gather = nullcontext, base: str | None = None) -> None:
    """Write only the adapters, in the format of peft's `PeftModel.from_pretrained`; ValueError if the model has none.

    Args:
        folder: gets adapter_model.safetensors and adapter_config.json; None on ranks that only take part in gathering.
        base: path or name of the base model, recorded in adapter_config.json.
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
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "adapter_model.safetensors") as file:
        file.write(save(tensors, metadata={"format": "pt"}))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": layers[0][1].rank,
        "lora_alpha": layers[0][1].alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name, _ in layers}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    write_whole(folder / "adapter_config.json", json.dumps(config, indent=2) + "\n")


def _adapted(model: nn.Module) -> list[tuple[str, LoraLinear]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear)]
