"""Log-probabilities and entropies of given tokens, without ever storing all [tokens, vocabulary] logits."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE_ELEMENTS = 4 * 1024 * 1024  # in a tile of logits, and in the weights it is computed from: 16 MiB each in fp32
TILE_ROWS = 2048  # rows that fit into every tile; products with fewer rows are slower


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log softmax(hidden weight^T / temperature)[target] and the entropy of the same distribution.

    Logits are computed one tile of rows and vocabulary at a time and recomputed in the backward pass, which needs only three
    saved numbers per row (cut cross-entropy, arXiv 2411.09009). For 16-bit hidden and weight the logits are rounded to that
    type, like the logits that the model returns; everything after that is fp32.

    Args:
        hidden: [N, C].
        weight: [V, C], hidden's dtype.
        targets: int64 [N], each in [0, V).

    Returns:
        log-probabilities [N] and entropies [N] in nats, both with gradient; fp32, or fp64 for fp64 inputs.
    """
    logprobs, entropies = _TokenLogprobs.apply(hidden, weight, targets, temperature)
    return logprobs, entropies


class _TokenLogprobs(torch.autograd.Function):
    """With z = h W^T / temperature, p = softmax(z), m = max z, S0 = sum_v exp(z_v - m), S1 = sum_v (z_v - m) exp(z_v - m):

    log p_target        = (z_target - m) - log S0        z - logsumexp(z) would lose precision for large z
    H = -sum p log p    = log S0 - S1 / S0
    d log p_target / dz = onehot(target) - p
    d H / dz            = -p (log p + H) = -p (z - m - S1 / S0)
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        ctx.set_materialize_grads(False)  # skips the entropies' gradient when it is not needed
        dtype = _statistics_dtype(hidden)
        lowest = torch.finfo(dtype).min  # finite, so that an empty row does not become inf - inf
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
    def backward(ctx, *grad_outputs):
        return _backward(ctx, *grad_outputs)


@once_differentiable
def _backward(ctx, grad_logprobs: Tensor | None, grad_entropies: Tensor | None):
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
            if grad_hidden is not None:
                _add_product(grad_hidden[rows], grad_z, w)
            if grad_w is not None:
                _add_product(grad_w, grad_z.t(), h[rows])
            elif needs_weight:
                grad_w = (grad_z.t() @ h[rows]).to(dtype)
        if grad_weight is not None:
            grad_weight[begin : begin + len(w)] = 0 if grad_w is None else grad_w
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None, None


def _tiles(hidden: Tensor, weight: Tensor) -> Iterator[tuple[int, Tensor, list[slice]]]:
    """The vocabulary's tiles: first token id, weights, and the blocks of rows to combine with them."""
    num_rows, size = hidden.shape
    high, wide = _tile_shape(num_rows, size, len(weight))
    blocks = [slice(begin, begin + high) for begin in range(0, len(hidden), high)]
    for begin in range(0, len(weight), wide):
        yield begin, weight[begin : begin + wide].to(_product_dtype(hidden)), blocks


def _tile_shape(num_rows: int, size: int, vocab_size: int) -> tuple[int, int]:
    """Rows and columns of a tile of logits; neither the tile nor its weights exceed TILE_ELEMENTS."""
    wide = max(1, min(vocab_size, TILE_ELEMENTS // max(size, TILE_ROWS)))
    return max(1, min(num_rows, TILE_ELEMENTS // wide)), wide


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def multiplies_bf16(device: torch.device) -> bool:
    """Whether bf16 matrix products are fast there; without oneDNN's, PyTorch uses plain loops, 7 to 90 times slower."""
    if device.type != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _product_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype == torch.bfloat16 and not multiplies_bf16(x.device) else x.dtype


def _logits(h: Tensor, w: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """h w^T rounded to `dtype`, then divided by the temperature in fp32 or fp64."""
    z = F.linear(h, w)
    z = z.to(dtype).to(_statistics_dtype(z))
    return z if temperature == 1 else z.div_(temperature)


def _add_tile(z: Tensor, top: Tensor, s0: Tensor, s1: Tensor) -> None:
    """Add a tile to the running maximum and both sums, in place; z is overwritten.

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
    """out[i] = z[i, columns[i]] for the columns inside the tile."""
    inside = (columns >= 0) & (columns < z.shape[1])
    picked = z.gather(-1, columns.clamp(0, z.shape[1] - 1)[:, None]).squeeze(-1)
    out.copy_(torch.where(inside, picked, out))


def _add_at(z: Tensor, columns: Tensor, values: Tensor) -> None:
    """z[i, columns[i]] += values[i] for the columns inside the tile."""
    inside = (columns >= 0) & (columns < z.shape[1])
    z.scatter_add_(-1, columns.clamp(0, z.shape[1] - 1)[:, None], torch.where(inside, values, 0)[:, None])


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a b, with the product rounded to a's dtype if that is narrower than out's."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        out += a @ b
