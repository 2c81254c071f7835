"""Pack the weights of a model that only generates, for faster matrix products on the CPU."""

from torch import Tensor, nn

from memrl.kernels.packed_linear import can_pack, pack_weight, packed_linear
from memrl.model.transformer import OutputLayer, Transformer


class PackedLinear(nn.Module):
    """A linear layer with a packed weight; see `kernels/packed_linear.py`."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.bias = linear.bias
        self.packed = pack_weight(linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.packed, self.bias)


class PackedOutput(PackedLinear):
    """The output layer with a packed weight; logits only."""

    def forward(self, x: Tensor, targets: Tensor | None = None, temperature: float = 1.0) -> Tensor:
        if targets is not None:
            raise RuntimeError("packed weights give logits only; load the model without packing for log-probabilities")
        return super().forward(x).float()


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
