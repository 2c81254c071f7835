"""Sample from the tokens that top_k, top_p and min_p keep.

These filters keep the first tokens in order of probability, so only those have to be found. The whole vocabulary is sorted only
for a filter that may keep any number of tokens, and then on a CPU only if the first `HEAD` tokens are not enough.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD = 1024  # on a CPU: tokens sorted first for a filter that may keep any number
_ID_BITS = 29
MIN_WIDTH = 32  # with smaller blocks, taking each block's maximum costs more than it saves
_SORT_ELEMENTS = 1 << 24  # sorted at once; the sort needs about 40 bytes for each

Head = tuple[Tensor, Tensor, Tensor]  # see `sample_head`


def find_above(cdf: Tensor, target: Tensor) -> Tensor:
    """For each row the first index where `cdf` [B, N] exceeds `target` [B, 1]: int64 [B].

    A target that rounding puts at or above the end gets the last index with positive probability.
    """
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous())
    index = torch.minimum(torch.searchsorted(cdf, target.contiguous(), right=True), last)
    return index.squeeze(-1).clamp(max=cdf.shape[-1] - 1)  # NaN sorts above everything


def order_keys(scaled: Tensor, ids: Tensor) -> Tensor:
    """Distinct int64 keys, ascending from the most likely token to the least likely one, equal logits by id.

    Non-negative doubles are ordered like their bits, and a double converted from fp32 has its low 29 bits free for the id.
    """
    distance = 0.0 - scaled  # not -scaled, which is -0.0 at the maximum and has the sign bit set
    return distance.double().view(torch.int64) | ids


def most_likely(scaled: Tensor, num: int) -> Tensor:
    """Keys of each row's `num` most likely tokens, in order.

    Args:
        scaled: fp32 [B, W], at most 0; W is a multiple of MIN_WIDTH, padded with -inf.
        num: at most the number of tokens before the padding.

    Returns:
        int64 [B, num], see `order_keys`.
    """
    batch, length = scaled.shape
    device = scaled.device
    width = max(MIN_WIDTH, 1 << ((length // num).bit_length() // 2))  # about sqrt(length / num)
    if num * width > length // 2 or length % width:
        keys = order_keys(scaled, torch.arange(length, device=device))
        return keys.topk(num, largest=False).values if num < length // 4 else keys.sort(-1).values[:, :num]
    # The num best tokens lie in the num blocks with the best maxima: if one lay elsewhere, each of those blocks would hold a
    # better one. Among equal maxima the lower block comes first, like the lower id among equal tokens.
    best = scaled.view(batch, -1, width).amax(-1)
    chosen = order_keys(best, torch.arange(length // width, device=device)).topk(num, largest=False, sorted=False).values
    ids = ids_of(chosen)[:, :, None] * width + torch.arange(width, device=device)
    ids = ids.flatten(1)
    return order_keys(scaled.gather(1, ids), ids).topk(num, largest=False).values


def ids_of(keys: Tensor) -> Tensor:
    return keys & ((1 << _ID_BITS) - 1)


def scaled_of(keys: Tensor) -> Tensor:
    return 0.0 - (keys & -(1 << _ID_BITS)).view(torch.float64).float()


def sample_head(keys: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor) -> Head:
    """Sample from the tokens that the filters keep among each row's most likely ones.

    A token with weight p = exp(scaled) and total weight `before` of the more likely tokens is kept if its rank is below top_k, if
    before < top_p * (weight of the top_k), and if p >= min_p. The most likely token has p = 1 and is always kept.

    Args:
        keys: int64 [B, K] from `most_likely`.
        total: fp64 [B], the weight of all tokens.
        top_k, top_p, min_p: int64, fp32 and fp32 [B]; 0, 1 and 0 turn them off.
        uniforms: fp64 [B] in [0, 1).

    Returns:
        ids int64 [B]; the kept tokens' weight fp64 [B]; and bool [B], whether a token after the K might have to be kept too.
    """
    num = keys.shape[-1]
    p = scaled_of(keys).exp()
    cdf = p.double().cumsum(-1)
    before = F.pad(cdf, (1, 0))[:, :-1]
    within_k = cdf.gather(1, (top_k - 1).clamp(0, num - 1)[:, None])
    mass = torch.where(top_k[:, None] > 0, within_k, total[:, None])
    keep = before < top_p[:, None] * mass
    keep &= p >= min_p[:, None]
    keep &= (torch.arange(num, device=keys.device) < top_k[:, None]) | (top_k[:, None] == 0)
    keep[:, 0] = True
    count = keep.sum(-1, keepdim=True)
    kept_mass = cdf.gather(1, count - 1)
    rank = find_above(cdf, uniforms[:, None] * kept_mass)
    open_end = (count.squeeze(1) == num) & ((top_k == 0) | (top_k > num))
    return ids_of(keys.gather(1, rank[:, None])).squeeze(1), kept_mass.squeeze(1), open_end


def sample_truncated(
    scaled: Tensor,
    vocab_size: int,
    total: Tensor,
    filters: tuple[Tensor, Tensor, Tensor],
    uniforms: Tensor,
    max_top_k: int,
    any_number: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row from the tokens that its filters keep; the result of rows without filters is meaningless.

    Args:
        scaled: fp32 [B, W]: (logits - their maximum) / temperature, padded with -inf; see `most_likely`.
        vocab_size: number of tokens before the padding.
        total: fp64 [B], sums of exp(scaled).
        filters: top_k, top_p and min_p; see `sample_head`.
        uniforms: fp64 [B] in [0, 1).
        max_top_k: the largest top_k of the batch.
        any_number: bool [B], rows with a filter but without top_k, which may keep any number of tokens; None if there are none.

    Returns:
        ids int64 [B] and the kept tokens' weights fp64 [B].
    """
    inputs = (scaled, total, *filters, uniforms)
    num_sorted = min(max_top_k, vocab_size)
    if any_number is not None:
        num_sorted = min(max(max_top_k, HEAD), vocab_size) if _reads_are_free(scaled) else vocab_size
    ids, mass, open_end = _sample(inputs, num_sorted)
    if any_number is not None and num_sorted < vocab_size:
        again = (open_end & any_number).nonzero().squeeze(1)
        if len(again):
            ids[again], mass[again], _ = _sample(tuple(part[again] for part in inputs), vocab_size)
    return ids, mass


def _sample(inputs: tuple[Tensor, ...], num: int) -> Head:
    """`sample_head` on the `num` most likely tokens, in groups of rows to bound the memory."""
    num_rows = max(1, _SORT_ELEMENTS // inputs[0].shape[1])
    parts = [
        sample_head(most_likely(scaled, num), *rest)
        for scaled, *rest in zip(*(values.split(num_rows) for values in inputs), strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    ids, masses, open_ends = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(masses), torch.cat(open_ends)


def _reads_are_free(values: Tensor) -> bool:
    """Whether the host can read a value without waiting for the device."""
    return values.device.type == "cpu"
