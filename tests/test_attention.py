"""Every attention backend against softmax(q k^T / sqrt(D)) v written out in fp64.

Triton's kernels run here where TRITON_INTERPRET=1 is set from the start; test_triton.py runs this file once more that way.
"""

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from memrl.kernels.attention import AttentionBackend, merge_into, pick_attention
from memrl.kernels.attention import triton_backend as tb
from memrl.kernels.attention.base import merge_parts
from memrl.kernels.attention.batched import EagerAttention, SdpaAttention
from memrl.kernels.attention.flash import FlashAttention
from memrl.kernels.attention.triton_backend import TritonAttention
from tests.fake_flash_attn import fake_flash_attn

INTERPRETED = tb.interpreted()
BACKENDS = [TritonAttention] if INTERPRETED else [EagerAttention, SdpaAttention, FlashAttention]
EXACT = torch.float32 if INTERPRETED else torch.float64  # the widest dtype that the backends above take

HEADS = [(2, 2), (3, 1), (6, 2)] if INTERPRETED else [(4, 2), (3, 3), (6, 1), (14, 2)]
TOLERANCES = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
NO_PAGE = 999_999  # in a table beyond a row's length


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request, monkeypatch) -> AttentionBackend:
    if request.param is FlashAttention:
        monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn())
    if request.param is TritonAttention:
        return pick_attention("triton", "cpu", EXACT)[0]
    return request.param()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = EXACT) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(num_tokens: int, heads: int, kv_heads: int, head_size: int = 8, dtype: torch.dtype = EXACT) -> list[Tensor]:
    return [
        2 * normal(num_tokens, heads, head_size, dtype=dtype),
        2 * normal(num_tokens, kv_heads, head_size, seed=1, dtype=dtype),
        normal(num_tokens, kv_heads, head_size, seed=2, dtype=dtype),
    ]


def formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One query [H, D] on keys and values [S, K, D], head by head, in fp64: out [H, D], lse [H]."""
    q, k, v = q.double(), k.double(), v.double()
    outs, lses = [], []
    for head in range(len(q)):
        kv_head = head // (len(q) // k.shape[1])
        scores = k[:, kv_head] @ q[head] / math.sqrt(q.shape[1])
        top = scores.max()
        weights = (scores - top).exp()
        outs.append((weights / weights.sum()) @ v[:, kv_head])
        lses.append(top + weights.sum().log())
    return torch.stack(outs), torch.stack(lses)


def stacked(results) -> tuple[Tensor, Tensor]:
    outs, lses = zip(*results, strict=True)
    return torch.stack(outs), torch.stack(lses)


def packed_formula(q: Tensor, k: Tensor, v: Tensor, seq_lens: list[int]) -> tuple[Tensor, Tensor]:
    results, start = [], 0
    for length in seq_lens:
        results += [formula(q[t], k[start : t + 1], v[start : t + 1]) for t in range(start, start + length)]
        start += length
    return stacked(results)


def pages_formula(q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: list[list[int]], lengths: list[int]):
    results = []
    for query, pages, length in zip(q, tables, lengths, strict=True):
        results.append(formula(query, *(pool[pages].flatten(0, 1)[:length] for pool in (k_pages, v_pages))))
    return stacked(results)


def padded(tables: list[list[int]]) -> Tensor:
    width = max(map(len, tables)) + 1
    return torch.tensor([table + [NO_PAGE] * (width - len(table)) for table in tables])


def attend_pages(backend: AttentionBackend, q, k_pages, v_pages, tables: list[list[int]], lengths: list[int]):
    plan = backend.plan_pages(padded(tables), torch.tensor(lengths), k_pages.shape[1], "cpu")
    return backend.pages(q, k_pages, v_pages, plan)


def assert_attention(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype = EXACT) -> None:
    (out, lse), (expected_out, expected_lse) = got, expected
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(out.double(), expected_out, **TOLERANCES[dtype])
    # Scores are fp32 whatever the inputs' dtype, but how exactly a fused kernel multiplies 16-bit numbers is the CPU's choice.
    lse_tolerance = TOLERANCES[dtype] if dtype.itemsize >= 4 else {"atol": 2e-4, "rtol": 1e-3}
    torch.testing.assert_close(lse.double(), expected_lse, **lse_tolerance)


# ---- packed


SEQ_LENS = [[1], [4, 4, 2, 2, 1, 4], [35, 3]]
if not INTERPRETED:
    SEQ_LENS += [[6], [1, 1, 1], [3, 1, 5]]


@pytest.mark.parametrize("seq_lens", SEQ_LENS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_packed_sequences_see_their_own_past(backend, heads, kv_heads, seq_lens):
    tensors = qkv(sum(seq_lens), heads, kv_heads)
    plan, expected = backend.plan_packed(seq_lens, "cpu"), packed_formula(*tensors, seq_lens)
    assert_attention(backend.packed_lse(*tensors, plan), expected)
    torch.testing.assert_close(backend.packed(*tensors, plan).double(), expected[0], **TOLERANCES[EXACT])


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_packed_has_the_formulas_gradients(backend, heads, kv_heads):
    seq_lens = [3, 1, 3]
    weights = normal(7, heads, 8, seed=3)
    gradients = []
    for attend in (
        lambda *tensors: packed_formula(*tensors, seq_lens)[0],
        lambda *tensors: backend.packed(*tensors, backend.plan_packed(seq_lens, "cpu")),
    ):
        tensors = [t.requires_grad_() for t in qkv(7, heads, kv_heads)]
        (attend(*tensors) * weights).sum().backward()
        gradients.append([t.grad for t in tensors])
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCES[EXACT])


@pytest.mark.skipif(INTERPRETED, reason="gradcheck wants fp64")
def test_packed_passes_gradcheck(backend):
    tensors = [t.requires_grad_() for t in qkv(5, 4, 2, 2)]
    assert gradcheck(lambda *t: backend.packed(*t, backend.plan_packed([3, 2], "cpu")), tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_size", [24, 80] if INTERPRETED else [16, 24, 80, 96])
def test_every_operation_in_every_dtype_and_head_size(backend, head_size, dtype):
    tensors, seq_lens = qkv(17, 6, 2, head_size, dtype), [9, 1, 7]
    plan = backend.plan_packed(seq_lens, "cpu")
    expected = packed_formula(*tensors, seq_lens)
    assert_attention(backend.packed_lse(*tensors, plan), expected, dtype)
    assert backend.packed(*tensors, plan).dtype == dtype
    queries = tensors[0][:3]
    assert_attention(backend.dense(queries, *tensors[1:]), stacked(formula(q, *tensors[1:]) for q in queries), dtype)
    k_pages, v_pages = (t[:16].unflatten(0, (4, 4)) for t in tensors[1:])
    tables, lengths = [[2, 0], [3], [1]], [7, 4, 1]
    expected = pages_formula(queries, k_pages, v_pages, tables, lengths)
    assert_attention(attend_pages(backend, queries, k_pages, v_pages, tables, lengths), expected, dtype)


def test_inputs_may_be_strided(backend):
    tensors = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in qkv(9, 4, 2)]
    assert not any(t.is_contiguous() for t in tensors)
    plan = backend.plan_packed([4, 5], "cpu")
    assert_attention(backend.packed_lse(*tensors, plan), packed_formula(*tensors, [4, 5]))
    assert_attention(backend.dense(*tensors), stacked(formula(q, *tensors[1:]) for q in tensors[0]))
    heads_first = [pool.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for pool in (normal(3, 4, 2, 8), normal(3, 4, 2, 8))]
    case = (tensors[0][:2], *heads_first, [[2, 0], [1]], [6, 3])
    assert_attention(attend_pages(backend, *case), pages_formula(*case))


@pytest.mark.parametrize("seq_lens", [[3], [3, 3]])
def test_lengths_that_do_not_add_up_are_refused(backend, seq_lens):
    plan = backend.plan_packed(seq_lens, "cpu")
    for operation in (backend.packed, backend.packed_lse):
        with pytest.raises(ValueError, match=f"planned sequences have {sum(seq_lens)} tokens, but q has 5"):
            operation(*qkv(5, 2, 1), plan)


# ---- dense


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 9), (5, 1), (7, 40)])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_dense_queries_see_every_key(backend, heads, kv_heads, num_queries, num_keys):
    q, (_, k, v) = normal(num_queries, heads, 8, seed=5), qkv(num_keys, heads, kv_heads)
    assert_attention(backend.dense(q, k, v), stacked(formula(query, k, v) for query in q))


# ---- pages


PAGE_CASES = {
    "in_order": ([[0, 1], [2, 3]], [8, 8]),
    "holes_in_the_range": ([[5, 2, 7], [0], [3, 1]], [11, 1, 8]),
    "far_apart": ([[20, 3], [11], [0, 31, 9]], [5, 4, 12]),
    "shared": ([[1, 0], [1, 2], [1]], [6, 8, 4]),
    "one_row_of_one_token": ([[2]], [1]),
}


@pytest.mark.parametrize("case", PAGE_CASES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_rows_see_their_pages(backend, heads, kv_heads, case):
    tables, lengths = PAGE_CASES[case]
    q = 2 * normal(len(tables), heads, 8)
    k_pages, v_pages = 2 * normal(32, 4, kv_heads, 8, seed=1), normal(32, 4, kv_heads, 8, seed=2)
    expected = pages_formula(q, k_pages, v_pages, tables, lengths)
    # Free pages may hold anything, even NaN; the rest of a row's last page holds finite leftovers.
    owned = sorted({page for table in tables for page in table})
    for pool in (k_pages, v_pages):
        pool[[page for page in range(32) if page not in owned]] = torch.nan
    if case != "shared":
        for table, length in zip(tables, lengths, strict=True):
            filled = length - 4 * (len(table) - 1)
            for pool in (k_pages, v_pages):
                pool[table[-1], filled:] = 1e4
    assert_attention(attend_pages(backend, q, k_pages, v_pages, tables, lengths), expected)


def test_pages_are_read_in_place_where_few_lie_between_them():
    in_place = {}
    for case, (tables, lengths) in PAGE_CASES.items():
        plan = EagerAttention().plan_pages(padded(tables), torch.tensor(lengths), 4, "cpu")
        in_place[case] = isinstance(plan.chosen, slice)
    assert in_place == {
        "in_order": True,
        "holes_in_the_range": True,
        "far_apart": False,
        "shared": False,
        "one_row_of_one_token": True,
    }


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_pages_of_any_size(backend, page_size):
    lengths = [33, 70, 1]
    ids = torch.randperm(120, generator=torch.Generator().manual_seed(0)).tolist()
    tables = [[ids.pop() for _ in range(-(-length // page_size))] for length in lengths]
    case = (normal(3, 4, 8), 2 * normal(120, page_size, 2, 8, seed=1), normal(120, page_size, 2, 8, seed=2), tables, lengths)
    assert_attention(attend_pages(backend, *case), pages_formula(*case))


@pytest.mark.skipif(not INTERPRETED, reason="only our own kernel cuts rows")
@pytest.mark.parametrize("least_share", [8, 64])
def test_rows_cut_into_parts_equal_whole_rows(backend, monkeypatch, least_share):
    monkeypatch.setattr(tb, "LEAST_SHARE", least_share)
    lengths = [150, 70, 1, 33]  # of 20 pages of 8 tokens: 20 or 2 parts, most of which are empty in short rows
    ids = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    tables = [[ids.pop() for _ in range(-(-length // 8))] for length in lengths]
    case = (normal(4, 4, 8), 2 * normal(40, 8, 2, 8, seed=1), normal(40, 8, 2, 8, seed=2), tables, lengths)
    assert_attention(attend_pages(backend, *case), pages_formula(*case))


# ---- parts of the keys


def test_scores_in_the_thousands_neither_overflow_nor_lose_the_maximum(backend):
    q, k, v = qkv(6, 4, 2)
    q = 1000 * q
    expected = packed_formula(q, k, v, [6])
    assert expected[1].abs().max() > 5000
    assert_attention(backend.packed_lse(q, k, v, backend.plan_packed([6], "cpu")), expected)
    assert_attention(backend.dense(q, k, v), stacked(formula(query, k, v) for query in q))
    case = (q[:2], k.unflatten(0, (3, 2)), v.unflatten(0, (3, 2)), [[2, 0], [1]], [3, 2])
    assert_attention(attend_pages(backend, *case), pages_formula(*case))


def test_a_prompt_in_chunks_equals_the_prompt_at_once(backend):
    q, k, v = qkv(12, 6, 2)
    expected = packed_formula(q, k, v, [12])
    out, lse = backend.packed_lse(q[7:], k[7:], v[7:], backend.plan_packed([5], "cpu"))
    for start, end in ((0, 3), (3, 7)):
        merge_into(out, lse, slice(0, 5), *backend.dense(q[7:], k[start:end], v[start:end]))
    assert_attention((out, lse), (expected[0][7:], expected[1][7:]))


@settings(max_examples=4 if INTERPRETED else 40, derandomize=True, deadline=None)
@given(data=st.data())
def test_merged_levels_of_prefixes_and_pages_equal_attention_to_all_keys(data):
    """Rows 0 .. B-1 have pages of their own; every level is a prefix that some of them share."""
    num_rows = data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=num_rows, max_size=num_rows))
    some_rows = st.sets(st.integers(0, num_rows - 1), min_size=1).map(sorted)
    levels = data.draw(st.lists(st.tuples(st.integers(1, 9), some_rows), max_size=3))
    heads, kv_heads = data.draw(st.sampled_from(HEADS))
    tables = [[3 * row + page for page in range(-(-length // 3))] for row, length in enumerate(lengths)]
    q = 2 * normal(num_rows, heads, 8, seed=data.draw(st.integers(0, 99)))
    k_pages, v_pages = 2 * normal(12, 3, kv_heads, 8, seed=1), normal(12, 3, kv_heads, 8, seed=2)
    keys, values = (
        [pool[pages].flatten(0, 1)[:length] for pages, length in zip(tables, lengths, strict=True)] for pool in (k_pages, v_pages)
    )
    for backend in [kind() for kind in BACKENDS if kind is not FlashAttention]:
        out, lse = attend_pages(backend, q, k_pages, v_pages, tables, lengths)
        all_keys, all_values = list(keys), list(values)
        for seed, (size, rows) in enumerate(levels):
            k, v = 2 * normal(size, kv_heads, 8, seed=10 + seed), normal(size, kv_heads, 8, seed=20 + seed)
            neighbours = rows == list(range(rows[0], rows[-1] + 1))
            tokens = slice(rows[0], rows[-1] + 1) if neighbours else torch.tensor(rows)
            merge_into(out, lse, tokens, *backend.dense(q[tokens], k, v))
            for row in rows:
                all_keys[row], all_values[row] = torch.cat([k, all_keys[row]]), torch.cat([v, all_values[row]])
        assert_attention((out, lse), stacked(map(formula, q, all_keys, all_values)))


def test_merging_ignores_parts_without_keys():
    out, lse = normal(2, 3, 4), normal(2, 3)
    outs, lses = torch.stack([out, torch.zeros_like(out)], 1), torch.stack([lse, torch.full_like(lse, -torch.inf)], 1)
    torch.testing.assert_close(merge_parts(outs, lses), (out, lse))
    merged = out.clone(), lse.clone()
    merge_into(*merged, slice(0, 2), outs[:, 1], lses[:, 1])
    torch.testing.assert_close(merged, (out, lse))
