"""Low-rank adapters: their formula, their names, agreement with peft, and a step under ZeRO-3 on two ranks."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from memrl.model import PackedContext, TransformerConfig, load_model, save_model
from memrl.model.loader import from_scratch, logits_of
from memrl.model.lora import LoraLinear, adapters_off, add_adapters, merged_weights, save_adapter
from memrl.model.saver import save_state
from memrl.rl.packing import empty_micro_batch
from tests.workers import lora_step as worker
from tests.workers.launch import torchrun

RANK, ALPHA = 4, 10.0
IDS = [1, 5, 7, 300, 11, 12]
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted(model, seed: int = 0):
    """A copy of the model with adapters that do something."""
    model = copy.deepcopy(model)
    add_adapters(model, RANK, ALPHA, seed)
    worker.fill_adapters(model)
    return model


def test_adapted_layer_computes_w_x_plus_scaled_b_a_x():
    linear = torch.nn.Linear(6, 5).double()
    layer = LoraLinear(linear, rank=3, alpha=7.5, generator=torch.Generator().manual_seed(0))
    torch.nn.init.normal_(layer.lora_B)
    x = torch.randn(4, 6, dtype=torch.float64)
    expected = x @ linear.weight.T + linear.bias + 2.5 * (x @ layer.lora_A.T @ layer.lora_B.T)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(F.linear(x, layer.merged_weight(), linear.bias), expected, rtol=1e-5, atol=1e-5)


def test_every_linear_layer_but_the_output_gets_an_adapter_and_nothing_else_is_trained(untied_model):
    names = {name for name, _ in untied_model.named_parameters()}
    add_adapters(untied_model, RANK, ALPHA, seed=0)
    parameters = dict(untied_model.named_parameters())
    places = [f"self_attn.{n}" if n[0] in "qkvo" else f"mlp.{n}" for n in LAYERS]
    fresh = {f"model.layers.{i}.{place}.lora_{part}" for i in range(2) for place in places for part in "AB"}
    assert parameters.keys() == names | fresh
    assert {name for name, parameter in parameters.items() if parameter.requires_grad} == fresh
    assert parameters["model.layers.0.mlp.down_proj.lora_A"].shape == (RANK, 128)
    assert parameters["model.layers.0.mlp.down_proj.lora_B"].shape == (64, RANK)


def test_fresh_adapters_change_nothing(tiny_model):
    before = logits_of(tiny_model, IDS)
    add_adapters(tiny_model, RANK, ALPHA, seed=0)
    assert torch.equal(logits_of(tiny_model, IDS), before)


def test_adapters_are_a_function_of_the_seed(tiny_model):
    first, same, other = (dict(adapted(tiny_model, seed).named_parameters()) for seed in (3, 3, 4))
    for name in first:
        assert torch.equal(first[name], same[name])
        assert torch.equal(first[name], other[name]) == ("lora_A" not in name)


def test_start_of_a_is_uniform_within_one_over_root_of_the_inputs():
    layer = LoraLinear(torch.nn.Linear(400, 3), rank=300, alpha=1, generator=torch.Generator().manual_seed(0))
    a = layer.lora_A.detach()
    assert a.abs().max() <= 0.05 and a.abs().max() > 0.0499
    assert a.std().item() == pytest.approx(0.05 / 3**0.5, rel=0.01) and abs(a.mean()) < 1e-3


def test_adapters_have_the_type_of_the_weights(tiny_model):
    model = adapted(tiny_model.to(torch.bfloat16))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert logits_of(model, IDS).isfinite().all()


def test_adapters_off_is_exactly_the_base_and_ends_with_its_block(tiny_model):
    model = adapted(tiny_model)
    base, whole = logits_of(tiny_model, IDS), logits_of(model, IDS)
    assert (whole - base).abs().max() > 0.1
    with pytest.raises(RuntimeError, match="stop"), adapters_off(model):
        assert torch.equal(logits_of(model, IDS), base)
        raise RuntimeError("stop")
    assert torch.equal(logits_of(model, IDS), whole)


@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_are_an_ordinary_model_of_the_same_function(tiny_model, untied_model, tmp_path, tied):
    plain = tiny_model if tied else untied_model
    model = adapted(plain)
    assert [name for name, _ in merged_weights(model)] == [name for name, _ in plain.named_parameters()]
    save_state(merged_weights(model), model.config, "float32", tmp_path / "merged")
    merged = load_model(tmp_path / "merged")
    torch.testing.assert_close(logits_of(merged, IDS), logits_of(model, IDS), rtol=1e-4, atol=1e-4)


def test_merging_in_bfloat16_rounds_once(tiny_model):
    model = adapted(tiny_model.to(torch.bfloat16))
    layer = model.model.layers[0].mlp.up_proj
    exact = layer.weight.double() + ALPHA / RANK * layer.lora_B.double() @ layer.lora_A.double()
    error = (dict(merged_weights(model))["model.layers.0.mlp.up_proj.weight"].double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + 1e-6).all()


def test_merging_holds_no_more_than_one_weight_gathered(tiny_model):
    model, held, most = adapted(tiny_model), [], []

    class Gathered:
        def __init__(self, parameters):
            self.parameters = parameters

        def __enter__(self):
            held.extend(self.parameters)
            most.append(len(held))

        def __exit__(self, *exception):
            held.clear()

    names = [name for name, _ in merged_weights(model, Gathered)]
    assert len(names) == len(most) and max(most) == 3 and not held


def test_second_adapters_are_refused(tiny_model):
    add_adapters(tiny_model, RANK, ALPHA, seed=0)
    with pytest.raises(ValueError, match="adapters already"):
        add_adapters(tiny_model, RANK, ALPHA, seed=0)


def test_a_model_without_adapters_has_none_to_save(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"model\.lora_rank"):
        save_adapter(tiny_model, tmp_path / "adapter")


def test_recomputed_layers_give_the_same_gradients(tiny_model):
    gradients = []
    for checkpoint_layers in (False, True):
        model = adapted(tiny_model).train()
        model.checkpoint_layers = checkpoint_layers
        ids = torch.tensor(IDS)
        logprobs, _ = model(ids[:-1], PackedContext([len(ids) - 1]), None, ids[1:])
        logprobs.sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert len(gradients[0]) == 2 * 2 * len(LAYERS)
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_peft_reads_the_saved_adapter_as_the_same_model(tiny_config, randomize, tmp_path, family):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = from_scratch(replace(tiny_config, family=family), seed=0)
    randomize(base, seed=0)
    save_model(base, tmp_path / "base")
    model = adapted(base)
    save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    with torch.no_grad():
        logits = theirs(torch.tensor([IDS])).logits[0]
        torch.testing.assert_close(logits_of(model, IDS), logits, rtol=1e-5, atol=1e-5)
        with theirs.disable_adapter():
            torch.testing.assert_close(logits_of(base, IDS), theirs(torch.tensor([IDS])).logits[0], rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == RANK
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[dict, Path]:
    """What two ranks under ZeRO-3 made of one step, and the folder with `base` and `adapter`."""
    folder = tmp_path_factory.mktemp("lora")
    shape = TransformerConfig(97, 48, 80, 2, 4, 2, 12, tie_word_embeddings=True, initializer_range=0.2)
    save_model(from_scratch(shape, seed=1), folder / "base")
    return torchrun(worker, folder / "out.pt", folder / "base", folder / "adapter"), folder


@pytest.fixture(scope="module")
def plain(two_ranks) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The base, and an adapted model with the same step's gradients by autograd alone: one process, no DeepSpeed."""
    base = load_model(two_ranks[1] / "base")
    model = copy.deepcopy(base).train()
    add_adapters(model, worker.CONFIG.model.lora_rank, worker.CONFIG.model.lora_alpha, worker.CONFIG.seed)
    worker.fill_adapters(model)
    batches = worker.make_batches()
    num_tokens = sum(batch.num_tokens for batch in batches)
    for batch in batches:
        worker.loss_of(run(model, batch), run(base, batch).detach(), batch, num_tokens).backward()
    return base, model


def run(model, batch) -> torch.Tensor:
    return model(batch.ids, PackedContext(batch.seq_lens), batch.select, batch.targets, worker.TEMPERATURE)[0]


@pytest.mark.slow
def test_gradients_of_two_ranks_equal_plain_autograd(two_ranks, plain):
    expected = {name: p.grad for name, p in plain[1].named_parameters() if p.requires_grad}
    assert two_ranks[0]["gradients"].keys() == expected.keys() and len(expected) == 2 * 2 * len(LAYERS)
    for name, gradient in expected.items():
        error = (two_ranks[0]["gradients"][name] - gradient).norm() / gradient.norm()
        assert error < 1e-6, f"{name}: relative error {error:.2e}"
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    assert two_ranks[0]["grad_norm"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.slow
def test_reference_of_two_ranks_is_exactly_the_base(two_ranks, plain):
    batches = worker.make_batches()
    for rank, found in enumerate(two_ranks[0]["ranks"]):
        mine = [*batches[rank::2], *([empty_micro_batch()] if rank else [])]
        for batch, logprobs in zip(mine, found["references"], strict=True):
            assert torch.equal(logprobs, run(plain[0], batch))
        assert torch.equal(found["after"], found["references"][0]), "a step must not move the reference"


@pytest.mark.slow
def test_replica_and_saved_adapter_are_the_trained_policy(two_ranks):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    result, folder = two_ranks
    replica = load_model(folder / "base")
    replica.load_state_dict(result["replica"])
    base = AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager")
    ids = IDS[:3]
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, folder / "adapter")(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(replica, ids), theirs, rtol=1e-4, atol=1e-4)
    assert (logits_of(load_model(folder / "base"), ids) - theirs).abs().max() > 0.1
