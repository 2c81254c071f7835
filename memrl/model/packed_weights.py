"""Pack the weights of a model that only generates into the blocked layout of oneDNN's bf16 matrix products, on the CPU.

A plain weight is converted to that layout in every call. With few rows, where the time goes into reading the weight, that costs
up to half the speed. The results are bitwise the same.
"""

import torch
from torch import Tensor, nn

from memrl.kernels.logprob import multiplies_bf16
from memrl.model.transformer import OutputLayer, Transformer


class PackedLinear(nn.Module):
    """A linear layer with a packed weight [out, in]: [T, in] -> [T, out], without gradient."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 16)  # an opaque tensor

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class PackedOutput(PackedLinear):
    """The output layer with a packed weight; logits only."""

    def forward(self, x: Tensor, targets: Tensor | None = None, temperature: float = 1.0) -> Tensor:
        if targets is not None:
            raise RuntimeError("packed weights give logits only; load the model without packing for log-probabilities")
        return super().forward(x).float()


def can_pack(weight: Tensor) -> bool:
    """Whether this is a bf16 weight on a CPU whose oneDNN multiplies bf16."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and multiplies_bf16(weight.device)


def pack_weights(model: Transformer) -> bool:
    """Pack every linear layer in place, one at a time; returns False, without changes, if the weights cannot be packed.

    The model can then only generate: it can be neither trained nor saved. The memory stays the same, except that a tied output
    layer becomes a separate copy.
    """
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not all(can_pack(module.weight) for _, module in linears):
        return False
    model.requires_grad_(False)
    while linears:
        name, module = linears.pop()
        parent, _, child = name.rpartition(".")
        kind = PackedOutput if isinstance(module, OutputLayer) else PackedLinear
        setattr(model.get_submodule(parent), child, kind(module))
    return True
