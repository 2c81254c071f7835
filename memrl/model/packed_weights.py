"""A model that only generates, with its weights laid out for that."""

from torch import Tensor, nn

from memrl.kernels.packed_linear import can_pack, pack_weight, packed_linear
from memrl.model.transformer import OutputLayer, Transformer


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.bias = linear.bias
        self.packed = pack_weight(linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.packed, self.bias)


class PackedOutput(PackedLinear):
    def forward(self, hidden: Tensor, targets: Tensor | None = None, temperature: float = 1.0) -> Tensor:
        if targets is not None:
            raise RuntimeError("packed weights give logits only; load the model without packing for log-probabilities")
        return super().forward(hidden).float()


def pack_weights(model: Transformer) -> bool:
    """Pack every linear layer in place, one at a time, and forget the plain weights; whether that was possible.

    Only for generating: the model can be neither trained nor saved afterwards. It takes the same memory, but that a tied output
    layer becomes a copy of its own.
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
