"""The gradient of a fixed batch does not depend on the number of ranks or on how the batch is cut.

The ranks are real processes under torchrun with real DeepSpeed ZeRO-3; the yardstick is plain autograd on the whole batch.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memrl.model import PackedContext
from memrl.model.loader import from_scratch
from memrl.rl.loss import policy_loss
from memrl.rl.packing import pack_turns

from .workers import gradients as worker

SCRIPT = Path(worker.__file__)


def launch(out: Path, ranks: int, micro_batch_tokens: int, persistence_threshold: int) -> dict:
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(SCRIPT), str(out), str(micro_batch_tokens), str(persistence_threshold)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert out.exists(), done.stderr[-3000:]
    return torch.load(out)


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    """Gradients by autograd alone: one micro-batch, one process, no DeepSpeed."""
    turns = [turn for group in worker.make_groups().values() for turn in group]
    [batch] = pack_turns(turns, 10**9)
    model = from_scratch(worker.CONFIG, seed=0).train()
    context = PackedContext(batch.seq_lens)
    logprobs, _ = model(batch.ids, context, batch.select, batch.targets)
    with torch.no_grad():
        reference, _ = worker.reference_model()(batch.ids, context, batch.select, batch.targets)
    rl = worker.RL
    loss, _ = policy_loss(
        logprobs,
        batch.old_logprobs,
        batch.advantages,
        reference,
        num_tokens=batch.num_tokens,
        clip_low=rl.clip_low,
        clip_high=rl.clip_high,
        dual_clip=rl.dual_clip,
        kl_coef=rl.kl_coef,
    )
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "micro_batch_tokens", "persistence_threshold"),
    [(1, 10**6, 100_000), (2, 120, 0)],
    ids=["one rank, one micro-batch", "two ranks, many micro-batches, all weights partitioned"],
)
def test_gradient_equals_plain_autograd(tmp_path, plain, ranks, micro_batch_tokens, persistence_threshold):
    result = launch(tmp_path / "out.pt", ranks, micro_batch_tokens, persistence_threshold)
    assert result["gradients"].keys() == plain.keys()
    for name, expected in plain.items():
        error = (result["gradients"][name] - expected).norm() / expected.norm()
        assert error < 1e-5, f"{name}: relative error {error:.2e}"
    norm = torch.stack([gradient.norm() for gradient in plain.values()]).norm().item()
    assert result["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert result["lr"] == worker.OPTIM.lr
    start = from_scratch(worker.CONFIG, seed=0).state_dict()
    moved = (result["weights"]["model.norm.weight"] - start["model.norm.weight"]).abs().max()
    assert 0.5 * worker.OPTIM.lr < moved < 2 * worker.OPTIM.lr
