"""The most likely tokens of a row, and a draw from those that top_k, top_p and min_p keep.

What these filters keep is always a head of the tokens in order of probability, so it is enough to know that head. It is found
without sorting the vocabulary, unless a device whose values cannot be read for free meets a filter that may keep any number.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD = 1024  # tokens ordered at first for a filter that may keep any number; on a CPU only
_ID_BITS = 29
MIN_WIDTH = 32  # a maximum over fewer neighbours is slower than it saves
_SORT_ELEMENTS = 1 << 24  # sorted at once: the sort's buffers take some 40 bytes for each


def find_above(cdf: Tensor, target: Tensor) -> Tensor:
    """For each row the first place where `cdf` [B, N] exceeds `target` [B, 1]: int64 [B].

    A target that rounding put at the end or beyond gets the last place with a probability, so none without one is returned.
    """
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous())
    place = torch.minimum(torch.searchsorted(cdf, target.contiguous(), right=True), last)
    return place.squeeze(-1).clamp(max=cdf.shape[-1] - 1)  # NaN is above everything


def order_keys(scaled: Tensor, ids: Tensor) -> Tensor:
    """Distinct int64 keys that ascend as tokens get less likely, equal logits by id.

    Non-negative doubles order as their bits do, and one made of an fp32 leaves its low 29 bits free for the id.
    """
    distance = 0.0 - scaled  # not -scaled, which is -0.0 at the maximum and has the sign bit set
    return distance.double().view(torch.int64) | ids


def most_likely(scaled: Tensor, num: int) -> Tensor:
    """Keys of each row's `num` most likely tokens, in order.

    Args:
        scaled: fp32 [B, W], at most 0; W is a multiple of MIN_WIDTH, filled up with -inf.
        num: at most the number of tokens before the filling.

    Returns:
        int64 [B, num], see `order_keys`.
    """
    batch, length = scaled.shape
    device = scaled.device
    width = max(MIN_WIDTH, 1 << ((length // num).bit_length() // 2))  # about sqrt(length / num)
    if num * width > length // 2 or length % width:
        keys = order_keys(scaled, torch.arange(length, device=device))
        return keys.topk(num, largest=False).values if num < length // 4 else keys.sort(-1).values[:, :num]
    # The num best tokens lie in the num neighbourhoods with the best maxima, for if one lay elsewhere, each of those would hold
    # a better one. Of equal maxima the lower neighbourhood goes first, and so do the lower ids.
    best = scaled.view(batch, -1, width).amax(-1)
    chosen = order_keys(best, torch.arange(length // width, device=device)).topk(num, largest=False, sorted=False).values
    ids = ids_of(chosen)[:, :, None] * width + torch.arange(width, device=device)
    ids = ids.flatten(1)
    return order_keys(scaled.gather(1, ids), ids).topk(num, largest=False).values


def ids_of(keys: Tensor) -> Tensor:
    return keys & ((1 << _ID_BITS) - 1)


def scaled_of(keys: Tensor) -> Tensor:
    return 0.0 - (keys & -(1 << _ID_BITS)).view(torch.float64).float()


def sample_head(keys: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor) -> tuple[Tensor, ...]:
    """Draw from the tokens kept among each row's most likely ones.

    A token with probability p = exp(scaled) and mass `before` in front of it is kept if its rank is below top_k, if
    before < top_p * (mass of the top_k), and if p >= min_p, the most likely token having p = 1. That one is always kept.

    Args:
        keys: int64 [B, K] from `most_likely`.
        total: fp64 [B], the mass of all tokens.
        top_k, top_p, min_p: int64, fp32 and fp32 [B]; 0, 1 and 0 are off.
        uniforms: fp64 [B] in [0, 1).

    Returns:
        ids int64 [B]; the kept tokens' mass fp64 [B]; and bool [B], whether a token behind the K might have been kept too.
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
    place = find_above(cdf, uniforms[:, None] * kept_mass)
    open_end = (count.squeeze(1) == num) & ((top_k == 0) | (top_k > num))
    return ids_of(keys.gather(1, place[:, None])).squeeze(1), kept_mass.squeeze(1), open_end


def sample_truncated(
    scaled: Tensor,
    vocab_size: int,
    total: Tensor,
    filters: tuple[Tensor, Tensor, Tensor],
    uniforms: Tensor,
    max_top_k: int,
    any_number: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row from what its filters keep; rows without filters get a token that means nothing.

    Args:
        scaled: fp32 [B, W]: (logits - their maximum) / temperature, filled up with -inf; see `most_likely`.
        vocab_size: tokens before the filling.
        total: fp64 [B], sums of exp(scaled).
        filters: top_k, top_p and min_p; see `sample_head`.
        uniforms: fp64 [B] in [0, 1).
        max_top_k: the largest top_k of the batch.
        any_number: bool [B], rows with a filter but without top_k, which may keep any number of tokens; None if there are none.

    Returns:
        ids int64 [B] and the kept tokens' masses fp64 [B].
    """
    inputs = (scaled, total, *filters, uniforms)
    if any_number is None:
        return _sample(inputs, min(max_top_k, vocab_size))[:2]
    if not _reads_are_free(scaled):
        return _sample(inputs, vocab_size)[:2]
    ids, mass, open_end = _sample(inputs, min(max(max_top_k, HEAD), vocab_size))
    again = (open_end & any_number).nonzero().squeeze(1)
    if len(again) and max(max_top_k, HEAD) < vocab_size:
        ids[again], mass[again], _ = _sample(tuple(part[again] for part in inputs), vocab_size)
    return ids, mass


def _sample(inputs: tuple[Tensor, ...], num: int) -> tuple[Tensor, ...]:
    """`sample_head` on the `num` most likely tokens, as many rows at a time as memory allows."""
    num_rows = max(1, _SORT_ELEMENTS // inputs[0].shape[1])
    parts = [
        sample_head(most_likely(scaled, num), *rest)
        for scaled, *rest in zip(*(values.split(num_rows) for values in inputs), strict=True)
    ]
    return parts[0] if len(parts) == 1 else tuple(torch.cat(values) for values in zip(*parts, strict=True))


def _reads_are_free(values: Tensor) -> bool:
    """Whether looking at a value makes nothing wait."""
    return values.device.type == "cpu"
