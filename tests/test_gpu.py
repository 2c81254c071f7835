"""Tests that need a GPU: run with `python -m pytest -m gpu` on a machine that has one."""

import pytest
import torch
from torch import Tensor

from memrl.kernels.attention import AttentionBackend, pick_attention
from memrl.kernels.attention.batched import EagerAttention
from memrl.model import PackedContext
from memrl.sampler import Sampler, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

PROMPTS = [[1, 2, 3], [7] * 20, list(range(50)), [5]]


def test_logits_and_gradients_equal_the_cpus(tiny_model):
    lens = [len(prompt) for prompt in PROMPTS]
    ids = torch.tensor([token for prompt in PROMPTS for token in prompt])
    results = []
    for device in ("cpu", "cuda"):
        model = tiny_model.to(device)
        model.zero_grad()
        logprobs, _ = model(ids[:-1].to(device), PackedContext(lens[:-1], device), None, ids[1:].to(device))
        logprobs.sum().backward()
        results.append((logprobs.detach().cpu(), model.model.embed_tokens.weight.grad.clone().cpu()))
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampler_logprobs_equal_a_packed_forward(tiny_model, dtype):
    model = tiny_model.to("cuda", dtype)
    params = [SamplingParams(8, seed=seed) for seed in range(len(PROMPTS))]
    for prompt, completion in zip(PROMPTS, Sampler(model, max_rows=3).generate(PROMPTS, params), strict=True):
        ids = torch.tensor(prompt + completion.ids, device="cuda")
        select = torch.arange(len(prompt) - 1, len(ids) - 1, device="cuda")
        with torch.no_grad():
            logprobs, _ = model(ids[:-1], PackedContext([len(ids) - 1], "cuda"), select, ids[len(prompt) :])
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        assert (logprobs.cpu() - torch.tensor(completion.logprobs)).abs().max() < tolerance


def test_greedy_tokens_equal_the_cpus(tiny_model):
    params = SamplingParams(8, temperature=0)
    on_cpu = [completion.ids for completion in Sampler(tiny_model).generate(PROMPTS, params)]
    on_gpu = [completion.ids for completion in Sampler(tiny_model.to("cuda")).generate(PROMPTS, params)]
    assert on_cpu == on_gpu


# ---- attention backends, at the shape of a Qwen2.5-7B layer


HEADS, KV_HEADS, HEAD_SIZE = 28, 4, 128
TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(params=["sdpa", "flash", "triton"])
def backend(request, dtype) -> AttentionBackend:
    try:
        return pick_attention(request.param, "cuda", dtype)[0]
    except ValueError as error:
        pytest.skip(str(error))


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
    return [normal(num_tokens, heads, HEAD_SIZE, dtype=dtype, seed=i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]


def assert_close(got, expected, dtype: torch.dtype) -> None:
    for ours, exact in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), exact, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_attention_to_sequences_equals_fp64s(backend, dtype):
    tensors, seq_lens, exact = qkv(378, dtype), [300, 1, 77], EagerAttention()
    on_gpu, in_fp64 = [t.cuda() for t in tensors], [t.double() for t in tensors]
    plan, exact_plan = backend.plan_packed(seq_lens, "cuda"), exact.plan_packed(seq_lens, "cpu")
    assert_close(backend.packed_lse(*on_gpu, plan), exact.packed_lse(*in_fp64, exact_plan), dtype)
    assert_close(backend.dense(*on_gpu), exact.dense(*in_fp64), dtype)
    gradients = []
    weights = normal(378, HEADS, HEAD_SIZE, dtype=dtype, seed=3)
    for attend, leaves in (
        (lambda *t: backend.packed(*t, plan), on_gpu),
        (lambda *t: exact.packed(*t, exact_plan), in_fp64),
    ):
        out = attend(*(leaf.requires_grad_() for leaf in leaves))
        (out * weights.to(out)).sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    assert_close(*gradients, dtype)


def page_case(page_size: int, dtype: torch.dtype, seed: int):
    """Three rows of one page, a few and many, scattered over a pool of 40: q, k_pages, v_pages, tables, lengths."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    lengths = torch.tensor([seed + 1, 3 * page_size, 12 * page_size - 7])
    pools = [normal(40, page_size, KV_HEADS, HEAD_SIZE, dtype=dtype, seed=i) for i in (1, 2)]
    return normal(3, HEADS, HEAD_SIZE, dtype=dtype, seed=seed), *pools, order[:36].view(3, 12), lengths


def test_attention_to_pages_equals_fp64s(backend, dtype):
    size, exact = backend.preferred_page_size, EagerAttention()
    q, k_pages, v_pages, tables, lengths = page_case(size, dtype, 0)
    got = backend.pages(q.cuda(), k_pages.cuda(), v_pages.cuda(), backend.plan_pages(tables, lengths, size, "cuda"))
    in_fp64 = [t.double() for t in (q, k_pages, v_pages)]
    assert_close(got, exact.pages(*in_fp64, exact.plan_pages(tables, lengths, size, "cpu")), dtype)


def test_a_graph_serves_the_tables_that_are_copied_into_it(backend, dtype):
    if not backend.graphable:
        pytest.skip(f"{backend.name} plans on the host")
    size = backend.preferred_page_size
    q, k_pages, v_pages, tables, lengths = page_case(size, dtype, 0)
    q, k_pages, v_pages = (t.cuda() for t in (q, k_pages, v_pages))
    plan = backend.plan_pages(tables, lengths, size, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        backend.pages(q, k_pages, v_pages, plan)  # compiles what there is to compile
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backend.pages(q, k_pages, v_pages, plan)
    for seed in (1, 2):
        new_q, _, _, tables, lengths = page_case(size, dtype, seed)
        fresh = backend.plan_pages(tables, lengths, size, "cuda")
        for kept, new in zip((q, *plan), (new_q, *fresh), strict=True):
            kept.copy_(new)
        graph.replay()
        torch.testing.assert_close(captured, backend.pages(q, k_pages, v_pages, fresh), rtol=0, atol=0)
