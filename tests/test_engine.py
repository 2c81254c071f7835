"""The policy under DeepSpeed on one rank: fp32 masters, offloading, frozen weights. Every engine here is a real one."""

import pytest
import torch

from memrl.config import EngineOptions, ModelOptions, OptimOptions
from memrl.engine.deepspeed_engine import deepspeed_config
from memrl.engine.load import load_policy
from memrl.model import PackedContext, save_model
from memrl.model.loader import from_scratch
from tests.workers import engine_options
from tests.workers.launch import torchrun


def test_policy_is_ready_to_train(tmp_path):
    save_model(from_scratch(engine_options.CONFIG, seed=1), tmp_path)
    options = ModelOptions(lora_rank=2, checkpoint_layers=False)
    policy = load_policy(tmp_path, options, OptimOptions(), EngineOptions(), 0, "cpu")
    assert policy.training and not policy.checkpoint_layers
    assert {name.rpartition(".")[2] for name, p in policy.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("options")
    return torchrun(engine_options, folder / "out.pt", folder, ranks=1)


def in_reach(weight: torch.Tensor) -> torch.Tensor:
    """Weights whose spacing in bfloat16 is 2^-13: an update of 1e-6 is lost in its rounding, and a hundred of them are not."""
    return (weight.abs() > 2**-6) & (weight.abs() < 2**-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tiny_updates_are_not_lost_in_bfloat16(options, stage):
    result = options["tiny"][stage]
    far = engine_options.TINY_LR * engine_options.TINY_UPDATES
    moved = total = 0
    for name, weight in result["weights"].items():
        assert weight.dtype == torch.bfloat16 and result["masters"][name].dtype == torch.float32
        assert torch.equal(result["masters"][name], weight.float())
        assert torch.equal(result["new_weights"][name], result["new_masters"][name].bfloat16())
        step = (result["new_masters"][name] - result["masters"][name]).abs()
        assert step.max() < 2 * far
        moved += int((result["new_weights"][name] != weight)[in_reach(weight)].sum())
        total += int(in_reach(weight).sum())
    up_proj = "model.layers.0.mlp.up_proj.weight"
    assert (result["new_masters"][up_proj] - result["masters"][up_proj]).abs().median() > 0.8 * far
    assert moved > 0.8 * total > 100


def test_tiny_updates_would_be_lost_without_masters():
    model = from_scratch(engine_options.CONFIG, seed=0, dtype="bfloat16").train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=engine_options.TINY_LR, weight_decay=0.0)
    ids = engine_options.IDS
    for _ in range(engine_options.TINY_UPDATES):
        optimizer.zero_grad()
        (-model(ids[:-1], PackedContext([len(ids) - 1]), None, ids[1:])[0].mean()).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter[in_reach(before[name])], before[name][in_reach(before[name])])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloading_to_cpu_memory_changes_nothing_but_rounding(options, dtype):
    plain, *offloaded = options["offloaded"][dtype]
    assert len(offloaded) == 2
    start = dict(from_scratch(engine_options.CONFIG, seed=0, dtype=dtype).named_parameters())
    for weights in offloaded:
        for name, expected in plain.items():
            if "k_proj.bias" in name:
                continue  # its gradient is zero but for rounding, which AdamW makes large
            torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-5)
            assert not torch.equal(weights[name], start[name])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adapters_resume_bit_for_bit_and_the_base_never_moves(options, stage):
    result = options["resumed"][stage]
    for name, end in result["end"].items():
        assert torch.equal(result["again"][name], end), name
        assert torch.equal(end, result["start"][name]) == ("lora_" not in name), name


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_frozen_has_no_gradient_and_is_in_no_checkpoint(options, stage):
    result = options["resumed"][stage]
    trained = {name for name in result["start"] if "lora_" in name}
    assert set(result["gradients"]) == trained and len(trained) == 28
    assert set(result["saved"]) - {"lm_head.weight"} == trained  # the second name of the tied matrix, which DeepSpeed overlooks


def test_offloading_is_asked_of_deepspeed_for_what_it_was_asked_for():
    def asked(**options) -> dict:
        zero = deepspeed_config(torch.bfloat16, OptimOptions(), EngineOptions(**options))["zero_optimization"]
        return {name: part["device"] for name, part in zero.items() if name.startswith("offload")}

    assert asked() == {}
    assert asked(offload_optimizer=True) == {"offload_optimizer": "cpu"}
    assert asked(offload_optimizer=True, offload_params=True) == {"offload_optimizer": "cpu", "offload_param": "cpu"}
