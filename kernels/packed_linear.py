"""y = x W^T + b with the weight laid out once for the CPU's matrix unit, as oneDNN wants it.

A plain weight is brought into that layout in every call. With few rows, where reading the weight is all the work, that costs
up to half the speed; the results are the same bits.
"""

import torch
from torch import Tensor


def can_pack(weight: Tensor) -> bool:
    """Whether this is a bf16 weight on a CPU whose oneDNN multiplies bf16."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_weight(weight: Tensor) -> Tensor:
    """A weight [out, in] in the layout that `packed_linear` takes; opaque, and nothing else can be done with it."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 16)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in], a packed weight [out, in], bias [out] -> [T, out]; no gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
