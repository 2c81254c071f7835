"""What only a GPU can show: run with `python -m pytest -m gpu` on a machine that has one."""

import pytest
import torch

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
