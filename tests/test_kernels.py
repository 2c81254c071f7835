"""Norm, activation and rotation against a naive fp64 implementation: values, gradients, bf16, unusual shapes."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from memrl.kernels.elementwise import apply_rope, rms_norm, swiglu

BF16 = {"rtol": 2e-2, "atol": 2e-2}
FP32 = {"rtol": 1e-4, "atol": 1e-5}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def slopes(function, inputs: list[Tensor], weights: Tensor, eps: float = 1e-6) -> list[Tensor]:
    """Central differences of sum(weights * function(*inputs)) by every input element, in fp64."""
    inputs, result = [x.clone() for x in inputs], []
    for x in inputs:
        slope = torch.empty_like(x)
        for i in range(x.numel()):
            kept = x.view(-1)[i].item()
            ends = []
            for value in (kept + eps, kept - eps):
                x.view(-1)[i] = value
                ends.append((weights * function(*inputs)).sum())
            x.view(-1)[i] = kept
            slope.view(-1)[i] = (ends[0] - ends[1]) / (2 * eps)
        result.append(slope)
    return result


def check_against(naive, fast, inputs: list[Tensor]) -> None:
    """`fast` on fp32 copies of the fp64 inputs has `naive`'s values and, by differences, its slopes."""
    expected = naive(*inputs)
    leaves = [x.float().requires_grad_() for x in inputs]
    out = fast(*leaves)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, **FP32)
    weights = normal(*expected.shape, seed=99)
    (out * weights.float()).sum().backward()
    for leaf, slope in zip(leaves, slopes(naive, inputs, weights), strict=True):
        torch.testing.assert_close(leaf.grad.double(), slope, rtol=1e-3, atol=1e-4)


# ---- rms_norm, swiglu, apply_rope


def naive_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    sizes = [math.sqrt(math.fsum(v * v for v in row) / len(row) + eps) for row in rows.tolist()]
    return torch.stack([row * weight / size for row, size in zip(rows, sizes, strict=True)]).view_as(x)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("shape", [(3, 5), (1, 7), (2, 2, 4)])
def test_rms_norm_is_the_formula(shape, eps):
    x, weight = normal(*shape), 1 + normal(shape[-1], seed=1)
    check_against(lambda x, w: naive_rms_norm(x, w, eps), lambda x, w: rms_norm(x, w, eps), [x, weight])


def test_rms_norm_in_bf16_takes_its_statistics_in_fp32():
    x, weight = 300 * normal(4, 1024, dtype=torch.bfloat16), 1 + normal(1024, seed=1, dtype=torch.bfloat16)
    out = rms_norm(x, weight, 1e-6)
    assert out.dtype == torch.bfloat16
    normed = naive_rms_norm(x.double(), torch.ones(1024, dtype=torch.float64), 1e-6).bfloat16()
    # Equal to the last bit but for the odd tie: nothing is rounded before the division.
    assert (out == weight * normed).double().mean() > 0.999


def test_swiglu_is_the_formula_and_its_gradient_exact():
    gate, up = 3 * normal(4, 5), normal(4, 5, seed=1)
    torch.testing.assert_close(swiglu(gate, up), gate / (1 + (-gate).exp()) * up, rtol=1e-12, atol=1e-12)
    assert gradcheck(swiglu, (gate.requires_grad_(), up.requires_grad_()))


def test_swiglu_in_bf16_is_close():
    gate, up = 3 * normal(4, 50, dtype=torch.bfloat16), normal(4, 50, seed=1, dtype=torch.bfloat16)
    out = swiglu(gate, up)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), swiglu(gate.double(), up.double()), **BF16)


def rotations(num_tokens: int, head_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random angles [T, D/2] and their cos and sin, written twice, [T, D]."""
    angles = 3 * normal(num_tokens, head_size // 2, seed=7)
    return angles, angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


@pytest.mark.parametrize(("heads", "head_size"), [(1, 2), (3, 8)])
def test_apply_rope_turns_pairs_half_a_head_apart(heads, head_size):
    x = normal(5, heads, head_size)
    angles, cos, sin = rotations(5, head_size)
    half = head_size // 2
    # A pair is a complex number, and turning it is multiplying it by e^(i angle).
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(apply_rope(x, cos, sin), expected, rtol=1e-12, atol=1e-12)
    assert gradcheck(lambda x: apply_rope(x, cos, sin), (x.requires_grad_(),))


def test_apply_rope_makes_scores_depend_on_distance_alone():
    q, k = normal(1, 1, 8), normal(1, 1, 8, seed=1)
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.01], dtype=torch.float64)

    def at(x, position):
        angles = (position * frequencies).repeat(2)[None]
        return apply_rope(x, angles.cos(), angles.sin())

    scores = [(at(q, p + 4) * at(k, p)).sum() for p in (0, 3, 1000)]
    torch.testing.assert_close(scores[1:], [scores[0]] * 2)
    assert (at(q, 5) * at(k, 0)).sum() != scores[0]
