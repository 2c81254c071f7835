"""token_logprobs against a naive fp64 implementation: values, both gradients, any tiling, bf16, extreme values."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from memrl.kernels import logprob
from memrl.kernels.logprob import token_logprobs

N, C, V = 5, 6, 11
TARGETS = torch.tensor([2, 0, 10, 10, 7])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(dtype: torch.dtype = torch.float64, rows: int = N) -> tuple[Tensor, Tensor]:
    return normal(rows, C, dtype=dtype).requires_grad_(), normal(V, C, seed=1, dtype=dtype).requires_grad_()


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)
    return log_p[torch.arange(len(hidden)), targets], -(log_p.exp() * log_p).sum(-1)


@pytest.fixture(params=["one tile", "tiles of 2 x 4", "tiles of 1 x 1"])
def tiles(request, monkeypatch):
    """How [5, 11] logits are cut; neither 5 nor 11 is a multiple of 2 or 4."""
    if request.param != "one tile":
        set_tiles(monkeypatch, *((2, 4) if "4" in request.param else (1, 1)))


def set_tiles(monkeypatch, high: int, wide: int) -> None:
    monkeypatch.setattr(logprob, "_tile_shape", lambda *_: (high, wide))


def test_a_large_vocabulary_is_cut_both_ways_and_every_logit_is_in_one_tile(monkeypatch):
    monkeypatch.setattr(logprob, "TILE_ROWS", 8)
    monkeypatch.setattr(logprob, "TILE_ELEMENTS", 40)
    seen = torch.zeros(19, V)
    for begin, w, blocks in logprob._tiles(torch.zeros(19, C), torch.zeros(V, C)):
        for rows in blocks:
            tile = seen[rows, begin : begin + len(w)]
            assert tile.numel() <= 40 and w.numel() <= 40
            tile += 1
    assert (seen == 1).all()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_log_softmax_s(dtype, temperature):
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    outs, grads = [], []
    for function, leaves in ((naive, inputs()), (token_logprobs, inputs(dtype))):
        logprobs, entropies = function(*leaves, TARGETS, temperature)
        g = normal(2, N, seed=3, dtype=logprobs.dtype)
        (logprobs * g[0] + entropies * g[1]).sum().backward()
        outs.append([logprobs.detach(), entropies.detach()])
        grads.append([leaf.grad for leaf in leaves])
    for exact, ours in zip(outs[0] + grads[0], outs[1] + grads[1], strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), exact, **close)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("output", [0, 1])
def test_the_gradient_of_each_output_is_its_slope(output):
    assert gradcheck(lambda h, w: token_logprobs(h, w, TARGETS, 0.7)[output], inputs())


@pytest.mark.usefixtures("tiles")
def test_gradients_are_exact_where_hidden_and_weight_are_tied():
    shared = normal(V, C).requires_grad_()
    assert gradcheck(lambda w: token_logprobs(w[TARGETS], w, TARGETS.flip(0)), (shared,))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("wanted", [0, 1])
def test_a_side_that_needs_no_gradient_gets_none(wanted):
    both, one = inputs(), inputs()
    one[1 - wanted].requires_grad_(False)
    for leaves in (both, one):
        token_logprobs(*leaves, TARGETS)[0].sum().backward()
    assert one[1 - wanted].grad is None
    torch.testing.assert_close(one[wanted].grad, both[wanted].grad)


def test_without_gradients_nothing_is_kept():
    with torch.no_grad():
        logprobs, entropies = token_logprobs(*inputs(), TARGETS)
    assert not logprobs.requires_grad and not entropies.requires_grad


@pytest.mark.usefixtures("tiles")
def test_no_rows_give_no_values_and_zero_gradients():
    hidden, weight = inputs(torch.float32, rows=0)
    logprobs, entropies = token_logprobs(hidden, weight, TARGETS[:0])
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    assert hidden.grad.shape == (0, C) and weight.grad.shape == (V, C) and not weight.grad.any()


@pytest.mark.parametrize("high", [1, 2, 5])
@pytest.mark.parametrize("wide", [1, 3, 10, 11])
def test_the_cut_changes_nothing_but_rounding(high, wide, monkeypatch):
    results = []
    for cut in (False, True):
        if cut:
            set_tiles(monkeypatch, high, wide)
        leaves = inputs(torch.float32)
        logprobs, entropies = token_logprobs(*leaves, TARGETS, 0.7)
        (logprobs * torch.arange(1, N + 1) + entropies).sum().backward()
        results.append([logprobs.detach(), entropies.detach(), *(leaf.grad for leaf in leaves)])
    for whole, tiled in zip(*results, strict=True):
        torch.testing.assert_close(tiled, whole, rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("product", [torch.bfloat16, torch.float32])
def test_bf16_rounds_the_logits_and_nothing_after(product, monkeypatch):
    monkeypatch.setattr(logprob, "_product_dtype", lambda _: product)
    hidden, weight = inputs(torch.bfloat16)
    logprobs, entropies = token_logprobs(hidden, weight, TARGETS)
    assert logprobs.dtype == entropies.dtype == torch.float32
    rounded = (hidden.float() @ weight.float().T).bfloat16().double()
    log_p = rounded.log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), log_p[torch.arange(N), TARGETS], rtol=0, atol=1e-6)
    torch.testing.assert_close(entropies.double(), -(log_p.exp() * log_p).sum(-1), rtol=0, atol=1e-6)
    logprobs.sum().backward()
    grad_z = torch.nn.functional.one_hot(TARGETS, V) - log_p.exp()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(hidden.grad.double(), grad_z @ weight.double(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(weight.grad.double(), grad_z.T @ hidden.double(), rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("tiles")
def test_extreme_logits_survive():
    hidden, weight = torch.ones(3, 1), torch.tensor([[1e4], [0.0], [-1e4]])
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    logprobs, entropies = token_logprobs(*leaves, torch.arange(3))
    assert logprobs.tolist() == [0.0, -1e4, -2e4] and entropies.tolist() == [0.0] * 3
    (logprobs + entropies).sum().backward()
    assert leaves[1].grad.flatten().tolist() == [-2.0, 1.0, 1.0]
    assert leaves[0].grad.flatten().tolist() == [0.0, -1e4, -2e4]


@pytest.mark.usefixtures("tiles")
def test_equal_logits_give_the_uniform_distribution():
    values = token_logprobs(torch.zeros(1, 4), torch.ones(8, 4), torch.tensor([3]))
    assert [value.item() for value in values] == pytest.approx([-math.log(8), math.log(8)])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("shift", [1000.0, -1000.0])
def test_large_logits_do_not_coarsen_log_probabilities(shift):
    # One fp32 step at 1000 is 6e-5: log p as z - logsumexp(z) could not be closer than that.
    z = torch.tensor([0.0, -0.5, -1.75]) + shift
    logprobs, _ = token_logprobs(torch.ones(3, 1), z[:, None], torch.arange(3))
    torch.testing.assert_close(logprobs.double(), z.double().log_softmax(-1), rtol=0, atol=5e-7)


def test_working_memory_does_not_grow_with_rows_times_vocabulary(monkeypatch):
    # The largest tensor of forward and backward, seen at every operation, is one of the inputs: tiles are smaller.
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor)]
            self.elements = max(self.elements, *sizes, 0)
            return out

    monkeypatch.setattr(logprob, "TILE_ROWS", 8)
    monkeypatch.setattr(logprob, "TILE_ELEMENTS", 512)
    hidden, weight = normal(300, 4, dtype=torch.float32), normal(200, 4, seed=1, dtype=torch.float32)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    with Largest() as seen:
        logprobs, entropies = token_logprobs(*leaves, torch.arange(300) % 200)
        (logprobs.sum() + entropies.sum()).backward()
    assert seen.elements <= 300 * 4
