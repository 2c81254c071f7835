"""Two Triton kernels: attention of packed or dense queries, and of one query per row over pages.

Both use FlashAttention's loop over blocks of keys with a running softmax (Dao et al., arXiv 2205.14135).

The G = H/K query heads of a key/value head are folded into the rows of one tile, so each key is read once for all of them:
folded row r is query r // G, head r % G of its group. Tile sizes are powers of two; masks cover the rest.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_queries", "num_keys"])  # they change in every call and would cause recompilation
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

    CAUSAL: each sequence attends to itself, causally. Otherwise one sequence of queries attends to all keys.
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
    tokens = (first_token + queries).to(tl.int64)  # offsets exceed 32 bits after a few hundred thousand tokens
    dims = tl.arange(0, WIDTH)
    valid = (queries < num_queries)[:, None] & (dims < HEAD)[None, :]
    q = tl.load(q_ptr + tokens[:, None] * q_token + heads[:, None] * q_head + dims[None, :], mask=valid, other=0.0)

    max_score = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    weighted_values = tl.zeros([ROWS, WIDTH], tl.float32)
    end = num_keys
    if CAUSAL:
        end = tl.minimum(num_keys, (tile * ROWS + ROWS - 1) // GROUP + 1)
    for start in range(0, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        places = (first_token + keys).to(tl.int64)
        in_range = (keys < num_keys)[:, None] & (dims < HEAD)[None, :]
        k = tl.load(k_ptr + places[:, None] * k_token + kv_head * k_head + dims[None, :], mask=in_range, other=0.0)
        v = tl.load(v_ptr + places[:, None] * v_token + kv_head * v_head + dims[None, :], mask=in_range, other=0.0)
        visible = (keys < num_keys)[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= queries[:, None])
        max_score, weight_sum, weighted_values = add_keys(q, k, v, visible, scale, max_score, weight_sum, weighted_values, DOT)

    places = tokens * (tl.num_programs(1) * GROUP) + heads
    tl.store(out_ptr + places[:, None] * HEAD + dims[None, :], weighted_values / weight_sum[:, None], mask=valid)
    tl.store(lse_ptr + places, max_score + tl.log(weight_sum), mask=queries < num_queries)


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
    valid = (group < GROUP)[:, None] & (dims < HEAD)[None, :]
    q = tl.load(q_ptr + row.to(tl.int64) * q_row + heads[:, None] * q_head + dims[None, :], mask=valid, other=0.0)

    max_score = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    weighted_values = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(split * share, tl.minimum(length, (split + 1) * share), KEYS):
        keys = start + tl.arange(0, KEYS)
        pages = tl.load(table_ptr + row * table_width + keys // PAGE, mask=keys < length, other=0).to(tl.int64)
        places = pages * kv_page + (keys % PAGE) * kv_token + kv_head * kv_head_stride
        in_range = (keys < length)[:, None] & (dims < HEAD)[None, :]
        k = tl.load(k_ptr + places[:, None] + dims[None, :], mask=in_range, other=0.0)
        v = tl.load(v_ptr + places[:, None] + dims[None, :], mask=in_range, other=0.0)
        max_score, weight_sum, weighted_values = add_keys(
            q, k, v, (keys < length)[None, :], scale, max_score, weight_sum, weighted_values, DOT
        )

    # A part without tokens gets out 0 and log-sum-exp -inf, hence weight 0 in the merge.
    places = (row.to(tl.int64) * tl.num_programs(2) + split) * (tl.num_programs(1) * GROUP) + heads
    out = weighted_values / tl.where(weight_sum > 0, weight_sum, 1.0)[:, None]
    tl.store(out_ptr + places[:, None] * HEAD + dims[None, :], out, mask=valid)
    tl.store(lse_ptr + places, max_score + tl.log(weight_sum), mask=group < GROUP)


@triton.jit
def add_keys(q, k, v, visible, scale, max_score, weight_sum, weighted_values, DOT: tl.constexpr):
    """Add one block of keys to the running softmax: max_score, weight_sum = sum of w, weighted_values = sum of w v, with
    w = e^(score - max_score).

    DOT is the dtype of the factors of matrix products; "ieee" prevents fp32 from being rounded to tf32.
    """
    scores = tl.dot(q.to(DOT), tl.trans(k.to(DOT)), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(max_score, tl.max(scores, 1))
    weights = tl.exp(scores - new_max[:, None])
    rescale = tl.exp(max_score - new_max)
    weighted_values = weighted_values * rescale[:, None] + tl.dot(weights.to(DOT), v.to(DOT), input_precision="ieee")
    return new_max, weight_sum * rescale + tl.sum(weights, 1), weighted_values
