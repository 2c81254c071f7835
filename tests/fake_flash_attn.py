"""A stand-in for flash-attn 2 without a GPU: its signatures, its requirements and its layouts, implemented with eager attention.

The signatures and layouts are those of flash_attn_interface.py, the demands those of flash_api.cpp, both of release 2.8.3; but
any dtype and page size will do, so that the tests can be exact and small.
"""

from types import ModuleType

import torch
from torch import Tensor

from memrl.kernels.attention.batched import EagerAttention

eager = EagerAttention()


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """q [B, M, H, D], k and v [B, S, K, D] -> out [B, M, H, D], lse [B, H, M], and nothing of use."""
    assert q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[0] == k.shape[0]
    _check_inputs(q, k, v)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = eager.attend(q, k, v, None, causal)
    out = out.transpose(1, 2)
    return (out, lse, torch.empty(0)) if return_attn_probs else out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """q [T, H, D], k and v [T, K, D] -> out [T, H, D], lse [H, T], and nothing of use."""
    assert causal and q.dim() == k.dim() == 3 and len(q) == len(k)
    _check_inputs(q, k, v)
    for starts, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        _check_int32(starts)
        assert starts[0] == 0 and starts[-1] == len(q)  # the package itself does not look
        assert type(longest) is int and longest == starts.diff().max()
    plan = eager.plan_packed(cu_seqlens_q.diff().tolist(), q.device)
    out = eager.packed(q, k, v, plan)
    return (out, eager.packed_lse(q, k, v, plan)[1].T.contiguous(), torch.empty(0)) if return_attn_probs else out


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """q [B, M, H, D], k_cache and v_cache [pages, page size, K, D] -> out [B, M, H, D], lse [B, H, M]."""
    assert q.dim() == k_cache.dim() == 4 and k_cache.shape == v_cache.shape and not causal
    _check_inputs(q, k_cache, v_cache)
    _check_int32(cache_seqlens)
    assert cache_seqlens.shape == (len(q),)
    assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1 and len(block_table) == len(q)
    outs, lses = [], []
    for queries, pages, length in zip(q, block_table, cache_seqlens.tolist(), strict=True):
        pages = pages[: -(-length // k_cache.shape[1])].long()
        keys, values = (cache[pages].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in (k_cache, v_cache))
        out, lse = eager.attend(queries.transpose(0, 1)[None], keys, values, None, causal=False)
        outs.append(out.transpose(1, 2))
        lses.append(lse)
    out, lse = torch.cat(outs), torch.cat(lses)
    return (out, lse) if return_softmax_lse else out


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert q.shape[-2] % k.shape[-2] == 0


def _check_int32(t: Tensor) -> None:
    assert t.dtype == torch.int32 and t.dim() == 1 and t.is_contiguous()


def fake_flash_attn(version: str = "2.8.3.post1") -> ModuleType:
    module = ModuleType("flash_attn")
    module.__version__ = version
    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
        setattr(module, function.__name__, function)
    return module
