"""Packed weights give bitwise the same logits, and the same tokens."""

import pytest
import torch

from memrl.model import load_model, logits_of, save_model
from memrl.model.packed_weights import PackedLinear, can_pack, pack_weights
from memrl.sampler import Sampler, SamplingParams

needs_bf16 = pytest.mark.skipif(
    not can_pack(torch.zeros(16, 16, dtype=torch.bfloat16)), reason="this CPU's oneDNN does not multiply bf16"
)


@needs_bf16
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_weight_is_the_same_product(rows, bias):
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 96, generator=generator).bfloat16() for n in (rows, 72))
    offset = torch.randn(72, generator=generator).bfloat16() if bias else None
    linear = torch.nn.Linear(96, 72, bias=bias)
    linear.weight.data = weight
    if offset is not None:
        linear.bias.data = offset
    out = PackedLinear(linear).requires_grad_(False)(x)
    exact = x.double() @ weight.double().T + (offset.double() if bias else 0)
    torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=2**-7)


def test_only_bf16_weights_on_a_cpu_are_packed(tiny_model):
    assert not can_pack(torch.zeros(16, 16))
    assert not pack_weights(tiny_model)
    assert tiny_model.lm_head.weight is tiny_model.model.embed_tokens.weight


@needs_bf16
@pytest.mark.parametrize("fixture", ["tiny_model", "untied_model"])
def test_a_packed_model_gives_the_same_logits_and_tokens(fixture, request):
    model = request.getfixturevalue(fixture).bfloat16()
    model.tie_weights()
    ids = torch.randint(512, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    params = [SamplingParams(8, seed=i) for i in range(4)]
    prompts = [ids[: 10 * (i + 1)] for i in range(4)]
    logits, completions = logits_of(model, ids), Sampler(model).generate(prompts, params)
    assert pack_weights(model)
    assert not list(model.model.layers[0].mlp.parameters())
    torch.testing.assert_close(logits_of(model, ids), logits, rtol=2**-6, atol=2**-6)
    packed = Sampler(model).generate(prompts, params)
    for one, other in zip(packed, completions, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs[:1]), torch.tensor(other.logprobs[:1]), rtol=0, atol=0.05)


@needs_bf16
def test_a_packed_model_says_what_it_cannot_do(tiny_model, tmp_path):
    model = tiny_model.bfloat16()
    assert pack_weights(model)
    with pytest.raises(ValueError, match="cannot be saved"):
        save_model(model, tmp_path / "model")
    with pytest.raises(RuntimeError, match="log-probabilities"):
        model.lm_head(torch.zeros(1, 64).bfloat16(), torch.zeros(1).long())


@needs_bf16
def test_loading_and_packing_leaves_the_folder_alone(tiny_model, tmp_path):
    save_model(tiny_model, tmp_path / "model")
    model = load_model(tmp_path / "model", dtype="bfloat16")
    assert pack_weights(model)
    assert load_model(tmp_path / "model").dtype == torch.float32
