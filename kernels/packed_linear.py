"""y = x W^T + b with the weight stored in the blocked layout of oneDNN's bf16 matrix products.

A plain weight is converted to that layout in every call. With few rows, where the time goes into reading the weight, that costs
up to half the speed. The results are bitwise the same.
"""

import torch
from torch import Tensor

from memrl.kernels.logprob import multiplies_bf16


def can_pack(weight: Tensor) -> bool:
    """Whether this is a bf16 weight on a CPU whose oneDNN multiplies bf16."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and multiplies_bf16(weight.device)


def pack_weight(weight: Tensor) -> Tensor:
    """A weight [out, in] in oneDNN's layout: an opaque tensor that only `packed_linear` can use."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 16)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in], a packed weight [out, in], bias [out] -> [T, out]; no gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
