"""Two Triton kernels: attention of packed or dense queries, and of one query per row over pages (FlashAttention's loop over
blocks of keys with a running softmax, Dao et al., arXiv 2205.14135).

In both, the G = H/K query heads of a key/value head are folded into the rows of one tile, so each key is read once for all of
them: folded row r is query r // G, head r % G of its group. Tiles are powers of two; masks make up for the rest.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_queries", "num_keys"])  # they change with every call, and each kind would be compiled
def attend_sequences(
    q_ptr,  # [T, H, D]
    k_ptr,  # [S, K, D]
    v_ptr,  # [S, K, D]
    out_ptr,  # [T, H, D], contiguous
    lse_ptr,  # [T, H], contiguous
    starts_ptr,  # [sequences + 1]; read if CAUSAL
    num_queries,  # T and S; not read if CAUSAL
    num_keys,
    scale,
    q_token,  # strides, in elements
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr,
    DOT: tl.constexpr,
):
    """Program (i, h, b): the i-th tile of folded rows, key/value head h, sequence b.

    CAUSAL: each sequence sees itself, causally. Else there is one sequence of queries, which sees all keys.
    """
    tile, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token = 0
    if CAUSAL:
        first_token = tl.load(starts_ptr + sequence)
        num_queries = tl.load(starts_ptr + sequence + 1) - first_token
        num_keys = num_queries
    if tile * ROWS >= num_queries * GROUP:
        return

    rows = tile * ROWS + tl.arange(0, ROWS)
    queries = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    tokens = (first_token + queries).to(tl.int64)  # a token's offset outgrows 32 bits within a few hundred thousand tokens
    dims = tl.arange(0, WIDTH)
    stored = (queries < num_queries)[:, None] & (dims < HEAD)[None, :]
    q = tl.load(q_ptr + tokens[:, None] * q_token + heads[:, None] * q_head + dims[None, :], mask=stored, other=0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    end = num_keys
    if CAUSAL:
        end = tl.minimum(num_keys, (tile * ROWS + ROWS - 1) // GROUP + 1)
    for start in range(0, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        places = (first_token + keys).to(tl.int64)
        there = (keys < num_keys)[:, None] & (dims < HEAD)[None, :]
        k = tl.load(k_ptr + places[:, None] * k_token + kv_head * k_head + dims[None, :], mask=there, other=0.0)
        v = tl.load(v_ptr + places[:, None] * v_token + kv_head * v_head + dims[None, :], mask=there, other=0.0)
        seen = (keys < num_keys)[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= queries[:, None])
        top, total, mixed = add_keys(q, k, v, seen, scale, top, total, mixed, DOT)

    places = tokens * (tl.num_programs(1) * GROUP) + heads
    tl.store(out_ptr + places[:, None] * HEAD + dims[None, :], mixed / total[:, None], mask=stored)
    tl.store(lse_ptr + places, top + tl.log(total), mask=queries < num_queries)


@triton.jit(do_not_specialize=["table_width"])
def attend_pages(
    q_ptr,  # [B, H, D]
    k_ptr,  # [pages, page size, K, D], and v of the same strides
    v_ptr,
    out_ptr,  # [B, splits, H, D] fp32, contiguous
    lse_ptr,  # [B, splits, H], contiguous
    table_ptr,  # [B, M], contiguous
    lengths_ptr,  # [B]
    table_width,  # M
    scale,
    q_row,  # strides, in elements
    q_head,
    kv_page,
    kv_token,
    kv_head_stride,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    DOT: tl.constexpr,
):
    """Program (b, h, s): row b, key/value head h, the s-th of equal parts of the row's tokens."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    share = tl.cdiv(tl.cdiv(length, tl.num_programs(2)), KEYS) * KEYS

    group = tl.arange(0, ROWS)
    heads = kv_head * GROUP + group
    dims = tl.arange(0, WIDTH)
    stored = (group < GROUP)[:, None] & (dims < HEAD)[None, :]
    q = tl.load(q_ptr + row.to(tl.int64) * q_row + heads[:, None] * q_head + dims[None, :], mask=stored, other=0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(split * share, tl.minimum(length, (split + 1) * share), KEYS):
        keys = start + tl.arange(0, KEYS)
        pages = tl.load(table_ptr + row * table_width + keys // PAGE, mask=keys < length, other=0).to(tl.int64)
        places = pages * kv_page + (keys % PAGE) * kv_token + kv_head * kv_head_stride
        there = (keys < length)[:, None] & (dims < HEAD)[None, :]
        k = tl.load(k_ptr + places[:, None] + dims[None, :], mask=there, other=0.0)
        v = tl.load(v_ptr + places[:, None] + dims[None, :], mask=there, other=0.0)
        top, total, mixed = add_keys(q, k, v, (keys < length)[None, :], scale, top, total, mixed, DOT)

    # A part without tokens has the weight 0 in the merge: out 0, log-sum-exp -inf.
    places = (row.to(tl.int64) * tl.num_programs(2) + split) * (tl.num_programs(1) * GROUP) + heads
    out = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + places[:, None] * HEAD + dims[None, :], out, mask=stored)
    tl.store(lse_ptr + places, top + tl.log(total), mask=group < GROUP)


@triton.jit
def add_keys(q, k, v, seen, scale, top, total, mixed, DOT: tl.constexpr):
    """One block of keys into the running softmax: largest score, sum of e^(score - top), and that sum over the values.

    DOT is the dtype of the products' factors, "ieee" keeps fp32 from being cut to tf32.
    """
    scores = tl.dot(q.to(DOT), tl.trans(k.to(DOT)), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp(scores - new_top[:, None])
    kept = tl.exp(top - new_top)
    mixed = mixed * kept[:, None] + tl.dot(weights.to(DOT), v.to(DOT), input_precision="ieee")
    return new_top, total * kept + tl.sum(weights, 1), mixed
