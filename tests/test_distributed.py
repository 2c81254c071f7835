"""Several ranks compute what one does: gradients of any loss however the batch is cut, policies loaded in parts, whole runs.

The ranks are real processes under torchrun with real DeepSpeed ZeRO-3; gradients are compared with plain autograd on the whole
batch, loaded policies with their file.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memrl.config import RLOptions
from memrl.engine import distributed
from memrl.model import PackedContext, TransformerConfig, save_model
from memrl.model.loader import from_scratch
from memrl.rl.aggregation import token_weights
from memrl.rl.loss import LossOptions, policy_loss
from memrl.rl.mismatch import correction
from memrl.rl.packing import pack_turns
from tests.recorded_run import NoisySampler, RecordedRun, make_inputs, recorded_run
from tests.workers import gradients, whole_runs
from tests.workers import two_ranks as two_ranks_worker
from tests.workers.launch import torchrun

# micro_batch_tokens, persistence_threshold, order of the turns
TWO_RANKS = (120, 0, 2)  # many micro-batches, all weights partitioned
OTHER_RANKS = {
    "one rank, one micro-batch": (1, 10**6, 100_000, 0),
    "one rank, many micro-batches, another order": (1, 60, 100_000, 1),
    "three ranks": (3, 200, 1000, 3),
}
MODELS = [(True, "bfloat16"), (False, "float32")]


def save_random(folder: Path, tied: bool, dtype: str) -> Path:
    shape = TransformerConfig(97, 48, 80, 2, 4, 2, 12, tie_word_embeddings=tied, initializer_range=0.2)
    save_model(from_scratch(shape, seed=1, dtype=dtype), folder)
    return folder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """The files of the whole runs, and these runs."""
    return tmp_path_factory.mktemp("whole_runs")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, inputs) -> tuple[dict, list[Path]]:
    """The results of one launch of two ranks, for all tests that need no other number; and the folders of MODELS."""
    folder = tmp_path_factory.mktemp("start")
    models = [save_random(folder / f"{tied}-{dtype}", tied, dtype) for tied, dtype in MODELS]
    make_inputs(inputs)
    return torchrun(two_ranks_worker, folder / "out.pt", inputs, *map(str, TWO_RANKS), *models), models


def plain_gradients(rl: RLOptions) -> dict[str, torch.Tensor]:
    """By autograd alone: one micro-batch, one process, no DeepSpeed."""
    turns = gradients.make_turns()
    lens, trajectories, groups = (
        torch.tensor(column)
        for column in zip(*((len(t.turn.response_ids), t.trajectory_id, t.group_id) for t in turns), strict=True)
    )
    weights, count = token_weights(rl.aggregation, lens, trajectories, groups, rl.aggregation_tokens)
    for turn, weight in zip(turns, weights.tolist(), strict=True):
        turn.weight = weight / count
    [batch] = pack_turns(turns, 10**9)
    model = from_scratch(gradients.CONFIG, seed=0).train()
    context = PackedContext(batch.seq_lens)
    logprobs, entropies = model(batch.ids, context, batch.select, batch.targets)
    old, fixed = batch.sampler_logprobs, None
    if rl.mismatch != "off":
        old = logprobs.detach()
        fixed = correction(old, batch.sampler_logprobs, batch.turn_index, rl.mismatch, rl.mismatch_bound)
    reference = None
    if rl.kl_coef:
        with torch.no_grad():
            reference = gradients.FrozenStart().logprobs(batch, context, 1.0)
    options = LossOptions(
        rl.loss, rl.clip_low, rl.clip_high, rl.dual_clip, rl.kl_coef, kl_estimator=rl.kl_estimator, entropy_coef=rl.entropy_coef
    )
    loss, _ = policy_loss(
        logprobs,
        old,
        batch.advantages,
        options,
        weights=batch.weights,
        ref_logprobs=reference,
        turn_index=batch.turn_index,
        entropies=entropies,
        correction=fixed,
    )
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, torch.Tensor]]:
    return {name: plain_gradients(rl) for name, rl in gradients.CASES.items()}


def test_gradients_of_two_ranks_equal_plain_autograd(two_ranks, plain):
    check_gradients(two_ranks[0]["gradients"], plain)


@pytest.mark.slow
@pytest.mark.parametrize("setup", OTHER_RANKS)
def test_gradients_equal_plain_autograd(tmp_path, plain, setup):
    ranks, *arguments = OTHER_RANKS[setup]
    check_gradients(torchrun(gradients, tmp_path / "out.pt", *map(str, arguments), ranks=ranks), plain)


def check_gradients(results: dict, plain: dict) -> None:
    assert results.keys() == plain.keys()
    for case, expected in plain.items():
        found = results[case]["gradients"]
        assert found.keys() == expected.keys()
        whole = torch.cat([gradient.flatten() for gradient in expected.values()])
        error = torch.cat([(found[name] - expected[name]).flatten() for name in expected]).norm() / whole.norm()
        assert error < 1e-6, f"{case}: relative error {error:.2e}"
        for name, gradient in expected.items():
            error = (found[name] - gradient).norm() / gradient.norm()
            assert error < 1e-5, f"{case}: {name}: relative error {error:.2e}"
        assert results[case]["grad_norm"] == pytest.approx(whole.norm().item(), rel=1e-5)


@pytest.fixture(params=range(len(MODELS)), ids=[f"{'tied' if tied else 'untied'} {dtype}" for tied, dtype in MODELS])
def case(request, two_ranks) -> tuple[dict, dict[str, torch.Tensor]]:
    """One model's results, and its file's tensors."""
    return two_ranks[0]["start"]["results"][request.param], load_file(two_ranks[1][request.param] / "model.safetensors")


def test_policy_loaded_in_parts_is_the_file_bit_for_bit(case):
    result, file = case
    assert result["start"].keys() == file.keys()
    for name, expected in file.items():
        assert result["start"][name].dtype == expected.dtype
        assert torch.equal(result["start"][name], expected), name
        assert result["masters"][name].dtype == torch.float32
        assert torch.equal(result["masters"][name], expected.float()), name


def test_each_rank_holds_its_part_alone_right_after_loading(two_ranks):
    for index, folder in enumerate(two_ranks[1]):
        total = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
        parts = [held[index] for held in two_ranks[0]["start"]["held"]]
        assert parts == [(total // 2, 0)] * 2


def test_training_from_parts_is_training_from_the_whole_model_bit_for_bit(case):
    result, file = case
    assert result["norms"] == result["norms_whole"]
    assert all(torch.equal(result["end"][name], result["end_whole"][name]) for name in file)
    assert not all(torch.equal(result["end"][name], file[name]) for name in file)


def test_policy_loaded_in_parts_is_ready_to_train(two_ranks):
    assert all(result["training"] and result["checkpoint_layers"] for result in two_ranks[0]["start"]["results"])


def test_a_policy_of_many_sub_groups_is_what_the_parts_were_loaded_into(two_ranks):
    assert all(result["sub_groups"] > 1 for result in two_ranks[0]["start"]["results"])


@pytest.fixture(scope="module")
def one_rank(two_ranks, inputs, tmp_path_factory) -> RecordedRun:
    """The same run on one rank, without DeepSpeed; tests/test_wiring_values.py compares such runs with others made by hand."""
    distributed.init("cpu")
    run = recorded_run(pytest.MonkeyPatch(), tmp_path_factory.mktemp("one"), whole_runs.SETTINGS, inputs, NoisySampler)
    distributed.shutdown()
    return run


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_metrics(found: list[dict], expected: list[dict]) -> None:
    for line, other in zip(found, expected, strict=True):
        assert line.keys() == other.keys()
        for name, value in line.items():
            assert value == pytest.approx(other[name], rel=1e-3, abs=1e-5), (line["step"], name)


def test_steps_of_two_ranks_are_those_of_one(one_rank, inputs):
    check_metrics(read_lines(inputs / "whole" / "metrics.jsonl"), one_rank.lines("metrics.jsonl"))
    assert read_lines(inputs / "whole" / "validation.jsonl") == one_rank.lines("validation.jsonl")
    weights = load_file(inputs / "whole" / "model" / "model.safetensors")
    for name, expected in one_rank.weights().items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=2e-4)
    line = one_rank.lines("metrics.jsonl")[0]
    assert line["loss/clip_frac"] > 0 and line["rollout/logprob_diff_max"] > 0.3, "the test needs updates that matter"


def test_two_ranks_compute_equally_much_in_every_optimizer_step(two_ranks, inputs):
    first, second = two_ranks[0]["tokens"]
    updates = [line["optim/updates"] for line in read_lines(inputs / "whole" / "metrics.jsonl")]
    assert len(first) == len(second) == sum(updates) > len(updates)
    for one, other in zip(first, second, strict=True):
        assert 1 / 1.3 < one / other < 1.3, (first, second)


def test_two_ranks_take_up_their_run_bit_for_bit(two_ranks, inputs):
    for name in ("metrics.jsonl", "rollouts.jsonl", "validation.jsonl", "model/model.safetensors"):
        assert (inputs / "again" / name).read_bytes() == (inputs / "whole" / name).read_bytes(), name


def test_one_rank_takes_up_the_run_of_two(two_ranks, inputs):
    states = [json.loads((inputs / "alone" / "checkpoints" / f"step-{step}" / "state.json").read_text()) for step in (1, 2)]
    assert [state["world_size"] for state in states] == [2, 1]
    check_metrics(read_lines(inputs / "alone" / "metrics.jsonl"), read_lines(inputs / "whole" / "metrics.jsonl"))
    weights, expected = (load_file(inputs / name / "model" / "model.safetensors") for name in ("alone", "whole"))
    for name in expected.keys() - {"model.layers.0.self_attn.k_proj.bias"}:  # its gradient is zero but for rounding
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=2e-4)
