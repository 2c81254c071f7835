"""Log-probability of given tokens without holding [tokens, vocabulary] at once."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE_ELEMENTS = 4 * 1024 * 1024  # of a tile of logits, and of the weights that it comes from: 16 MiB each in fp32
TILE_ROWS = 2048  # that a tile has room for, whatever the vocabulary; products of fewer are slower


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log softmax(hidden weight^T / temperature)[target] and the entropy of the same distribution.

    Logits exist a tile of rows and vocabulary at a time, and are computed again in the backward pass, for which three numbers a
    row are kept: the idea of cut cross-entropy, arXiv 2411.09009. Where hidden and weight are 16-bit the logits are rounded to
    that type, as those that a model returns are; everything after them is fp32.

    Args:
        hidden: [N, C].
        weight: [V, C], hidden's dtype.
        targets: int64 [N], each in [0, V).

    Returns:
        log-probabilities [N] and entropies [N] in nats, both with gradient; fp32, or fp64 for fp64 inputs.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, temperature)


class _TokenLogprobs(torch.autograd.Function):
    """With z = h W^T / temperature, p = softmax(z), m = max z, S0 = sum_v exp(z_v - m), S1 = sum_v (z_v - m) exp(z_v - m):

    log p_target        = (z_target - m) - log S0        not z - logsumexp(z), which rounds as coarsely as z is large
    H = -sum p log p    = log S0 - S1 / S0
    d log p_target / dz = onehot(target) - p
    d H / dz            = -p (log p + H) = -p (z - m - S1 / S0)
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        ctx.set_materialize_grads(False)  # nobody asks for the entropies' gradient: none is computed
        dtype = _statistics_dtype(hidden)
        lowest = torch.finfo(dtype).min  # finite, so that what is empty does not become inf - inf
        top, target_z = hidden.new_full((2, len(hidden)), lowest, dtype=dtype)
        s0, s1 = hidden.new_zeros((2, len(hidden)), dtype=dtype)
        h = hidden.to(_product_dtype(hidden))
        for begin, w, blocks in _tiles(hidden, weight):
            for rows in blocks:
                z = _logits(h[rows], w, hidden.dtype, temperature)
                _pick(z, targets[rows] - begin, target_z[rows])
                _add_tile(z, top[rows], s0[rows], s1[rows])
        mean = s1 / s0
        log_s0 = s0.log()
        ctx.save_for_backward(hidden, weight, targets, top, s0, mean)
        ctx.temperature = temperature
        return (target_z - top).sub_(log_s0), log_s0 - mean

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        hidden, weight, targets, top, s0, mean = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        dtype, product = _statistics_dtype(hidden), _product_dtype(hidden)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(top)
        grad_target = grad_logprobs / ctx.temperature
        # dloss/dz = onehot grad_target - exp(z - m) (offset + slope (z - m))
        offset, slope = grad_target / s0, None
        if grad_entropies is not None:
            slope = grad_entropies / (s0 * ctx.temperature)
            offset = offset - slope * mean
        # Sums over tiles and over row blocks are fp32, so that they do not depend on how many there are.
        grad_hidden = torch.zeros_like(hidden, dtype=dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        h = hidden.to(product)
        for begin, w, blocks in _tiles(hidden, weight):
            grad_w = None
            for rows in blocks:
                z = _logits(h[rows], w, hidden.dtype, ctx.temperature).sub_(top[rows, None])
                factor = -offset[rows, None] if slope is None else (z * slope[rows, None]).add_(offset[rows, None]).neg_()
                grad_z = z.exp_().mul_(factor)
                _add_at(grad_z, targets[rows] - begin, grad_target[rows])
                grad_z = grad_z.to(product)
                if needs_hidden:
                    _add_product(grad_hidden[rows], grad_z, w)
                if needs_weight and grad_w is None:
                    grad_w = (grad_z.t() @ h[rows]).to(dtype)
                elif needs_weight:
                    _add_product(grad_w, grad_z.t(), h[rows])
            if needs_weight:
                grad_weight[begin : begin + len(w)] = 0 if grad_w is None else grad_w
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None, None


def _tiles(hidden: Tensor, weight: Tensor) -> Iterator[tuple[int, Tensor, list[slice]]]:
    """The vocabulary's tiles: where each begins, its weights, and the blocks of rows to take with it."""
    high, wide = _tile_shape(*hidden.shape, len(weight))
    blocks = [slice(begin, begin + high) for begin in range(0, len(hidden), high)]
    for begin in range(0, len(weight), wide):
        yield begin, weight[begin : begin + wide].to(_product_dtype(hidden)), blocks


def _tile_shape(num_rows: int, size: int, vocab_size: int) -> tuple[int, int]:
    """Rows and columns of a tile of logits; neither it nor the weights behind it have more than TILE_ELEMENTS."""
    wide = max(1, min(vocab_size, TILE_ELEMENTS // max(size, TILE_ROWS)))
    return max(1, min(num_rows, TILE_ELEMENTS // wide)), wide


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def multiplies_bf16(device: torch.device) -> bool:
    """Whether products of bf16 matrices are fast there: where oneDNN has none PyTorch's are plain loops, 7 to 90 times slower."""
    if device.type != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _product_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype == torch.bfloat16 and not multiplies_bf16(x.device) else x.dtype


def _logits(h: Tensor, w: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """h w^T rounded to `dtype`, then over the temperature, in fp32 or fp64."""
    z = F.linear(h, w)
    z = z.to(dtype).to(_statistics_dtype(z))
    return z if temperature == 1 else z.div_(temperature)


def _add_tile(z: Tensor, top: Tensor, s0: Tensor, s1: Tensor) -> None:
    """Take a tile into the running maximum and both sums, in place; z is used up.

    When the maximum rises by d, exp(z - m) shrinks by exp(-d), and (z - m) by d: the online softmax, arXiv 1805.02867, section 3.
    """
    higher = torch.maximum(top, z.amax(-1))
    change = top - higher
    scale = change.exp()
    e = z.sub_(higher[:, None]).exp()
    s1.add_(change * s0).mul_(scale).add_(z.mul_(e).sum(-1))
    s0.mul_(scale).add_(e.sum(-1))
    top.copy_(higher)


def _pick(z: Tensor, columns: Tensor, out: Tensor) -> None:
    """out[i] = z[i, columns[i]] where that column is in the tile."""
    inside = (columns >= 0) & (columns < z.shape[1])
    picked = z.gather(-1, columns.clamp(0, z.shape[1] - 1)[:, None]).squeeze(-1)
    out.copy_(torch.where(inside, picked, out))


def _add_at(z: Tensor, columns: Tensor, values: Tensor) -> None:
    """z[i, columns[i]] += values[i] where that column is in the tile."""
    inside = (columns >= 0) & (columns < z.shape[1])
    z.scatter_add_(-1, columns.clamp(0, z.shape[1] - 1)[:, None], torch.where(inside, values, 0)[:, None])


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a b, rounding the product to a's dtype where that is narrower than out's."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        out += a @ b
