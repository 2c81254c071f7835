"""The gradient of a fixed batch does not depend on the number of ranks or on how the batch is cut, for any loss.

The ranks are real processes under torchrun with real DeepSpeed ZeRO-3; the yardstick is plain autograd on the whole batch.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memrl.config import RLOptions
from memrl.model import PackedContext
from memrl.model.loader import from_scratch
from memrl.rl.aggregation import token_weights
from memrl.rl.loss import policy_loss
from memrl.rl.mismatch import correction
from memrl.rl.packing import pack_turns
from memrl.rl.update import loss_options

from .workers import gradients as worker

SCRIPT = Path(worker.__file__)
SETUPS = {
    "two ranks, many micro-batches, all weights partitioned": (2, 120, 0, 2),
}
SLOW_SETUPS = {
    "one rank, one micro-batch": (1, 10**6, 100_000, 0),
    "one rank, many micro-batches, another order": (1, 60, 100_000, 1),
    "three ranks": (3, 200, 1000, 3),
}


def launch(out: Path, ranks: int, *arguments: int) -> dict:
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(SCRIPT), str(out), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert out.exists(), done.stderr[-3000:]
    return torch.load(out)


def plain_gradients(rl: RLOptions) -> dict[str, torch.Tensor]:
    """By autograd alone: one micro-batch, one process, no DeepSpeed."""
    turns = worker.make_turns()
    lens, trajectories, groups = (
        torch.tensor(column)
        for column in zip(*((len(t.turn.response_ids), t.trajectory_id, t.group_id) for t in turns), strict=True)
    )
    weights, count = token_weights(rl.aggregation, lens, trajectories, groups, rl.aggregation_tokens)
    for turn, weight in zip(turns, weights.tolist(), strict=True):
        turn.weight = weight / count
    [batch] = pack_turns(turns, 10**9)
    model = from_scratch(worker.CONFIG, seed=0).train()
    context = PackedContext(batch.seq_lens)
    logprobs, entropies = model(batch.ids, context, batch.select, batch.targets)
    old, fixed = batch.sampler_logprobs, None
    if rl.mismatch != "off":
        old = logprobs.detach()
        fixed = correction(old, batch.sampler_logprobs, batch.turn_index, rl.mismatch, rl.mismatch_bound)
    reference = None
    if rl.kl_coef:
        with torch.no_grad():
            reference = worker.FrozenStart().logprobs(batch, context, 1.0)
    loss, _ = policy_loss(
        logprobs,
        old,
        batch.advantages,
        loss_options(rl),
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
    return {name: plain_gradients(rl) for name, rl in worker.CASES.items()}


@pytest.mark.parametrize(
    "setup",
    [pytest.param(setup, id=name) for name, setup in SETUPS.items()]
    + [pytest.param(setup, id=name, marks=pytest.mark.slow) for name, setup in SLOW_SETUPS.items()],
)
def test_gradients_equal_plain_autograd(tmp_path, plain, setup):
    results = launch(tmp_path / "out.pt", *setup)
    assert results.keys() == plain.keys()
    for case, expected in plain.items():
        gradients = results[case]["gradients"]
        assert gradients.keys() == expected.keys()
        whole = torch.cat([gradient.flatten() for gradient in expected.values()])
        error = torch.cat([(gradients[name] - expected[name]).flatten() for name in expected]).norm() / whole.norm()
        assert error < 1e-6, f"{case}: relative error {error:.2e}"
        for name, gradient in expected.items():
            error = (gradients[name] - gradient).norm() / gradient.norm()
            assert error < 1e-5, f"{case}: {name}: relative error {error:.2e}"
        assert results[case]["grad_norm"] == pytest.approx(whole.norm().item(), rel=1e-5)
