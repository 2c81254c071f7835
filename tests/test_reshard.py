"""A ZeRO checkpoint taken up on another number of ranks: real DeepSpeed, every stage, weights and moments bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .workers import reshard as worker

SCRIPT = Path(worker.__file__)


def launch(ranks: int, *arguments: object) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert Path(arguments[2]).exists(), done.stderr[-3000:]


@pytest.mark.parametrize(
    ("stage", "dtype", "before", "after"),
    [
        pytest.param(3, "float32", 2, 1, marks=pytest.mark.slow),
        pytest.param(3, "bfloat16", 1, 2, marks=pytest.mark.slow),
        pytest.param(3, "bfloat16", 3, 2, marks=pytest.mark.slow),
        pytest.param(2, "float32", 1, 3, marks=pytest.mark.slow),
        pytest.param(2, "bfloat16", 2, 1, marks=pytest.mark.slow),
        pytest.param(1, "float32", 2, 1, marks=pytest.mark.slow),
        pytest.param(1, "bfloat16", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_weights_moments_and_schedule_go_on_at_another_world_size(tmp_path, stage, dtype, before, after):
    saved, loaded = tmp_path / "saved.pt", tmp_path / "loaded.pt"
    launch(before, "save", tmp_path / "checkpoint", saved, stage, dtype)
    launch(after, "load", tmp_path / "checkpoint", loaded, stage, dtype)
    whole, resumed = torch.load(saved), torch.load(loaded)
    assert "moments" in resumed["words"] and "not carried" in resumed["words"]
    assert len(whole["state"]) > 15
    assert whole["state"].keys() == resumed["state"].keys()
    for name, tensor in whole["state"].items():
        assert torch.equal(tensor, resumed["state"][name]), name
    assert set(resumed["adam_step"]) == set(whole["adam_step"]) == {worker.STEPS}
    assert stage < 3 or len(whole["adam_step"]) > 1, "AdamW's state is in one piece, as no large model's is"
    # What follows differs by the order of sums over ranks alone.
    precision = 1e-6 if dtype == "float32" else 1e-2
    for (norm, rate), (norm_resumed, rate_resumed) in zip(whole["steps"], resumed["steps"], strict=True):
        assert rate == rate_resumed
        assert norm == pytest.approx(norm_resumed, rel=precision)
    for name, tensor in whole["after"].items():
        if name.endswith("master"):
            assert torch.allclose(tensor, resumed["after"][name], rtol=precision, atol=precision), name


@pytest.mark.slow
def test_a_checkpoint_before_the_first_update_has_no_moments_to_carry(tmp_path):
    launch(1, "save", tmp_path / "checkpoint", tmp_path / "saved.pt", 3, "float32", "--early")
    launch(2, "load", tmp_path / "checkpoint", tmp_path / "loaded.pt", 3, "float32", "--early")
    whole, resumed = torch.load(tmp_path / "saved.pt"), torch.load(tmp_path / "loaded.pt")
    for (norm, rate), (norm_resumed, rate_resumed) in zip(whole["steps"], resumed["steps"], strict=True):
        assert rate == rate_resumed
        assert norm == pytest.approx(norm_resumed, rel=1e-6)
