"""Training on several machines: they share one folder and one command, and a signal stops them after the same step.

Two machines are two torchruns with one rank each, which find each other as on a network.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memrl.config import TrainConfig
from memrl.engine import distributed
from memrl.training import same_run as agreement
from memrl.training.checkpoint import RunFolder
from tests.tiny_run import make_run

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def second_rank(monkeypatch, tmp_path):
    """open(...) of a rank 1 whose rank 0 opened `tmp_path / "first"` with the default settings."""
    monkeypatch.setattr(agreement, "VISIBLE_S", 0.2)
    monkeypatch.setattr(distributed, "gather_lists", lambda items: items)
    monkeypatch.setattr(distributed, "from_rank_0", lambda value: value)
    sent = []
    with monkeypatch.context() as first:
        first.setattr(distributed, "rank", lambda: 0)
        first.setattr(distributed, "from_rank_0", lambda value: sent.append(value) or value)
        RunFolder(tmp_path / "first").open(TrainConfig(), {"data": "a"})
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(distributed, "from_rank_0", lambda value: sent.pop(0))
    return lambda name, config, inputs: RunFolder(tmp_path / name).open(config, inputs)


def test_a_rank_that_shares_folder_and_settings_may_have_its_files_elsewhere(second_rank):
    config = TrainConfig()
    config.model.path, config.threads = "/mnt/model", 3
    assert second_rank("first", config, {"data": "a"}) == 0


def test_a_rank_with_a_folder_of_its_own_is_refused(second_rank):
    with pytest.raises(ValueError, match=r"rank 1 on .* cannot read what rank 0 writes into .*second; give a run_dir"):
        second_rank("second", TrainConfig(), {"data": "a"})


def test_a_rank_with_a_leftover_of_the_same_folder_is_refused(second_rank, tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / ".lock").write_text("of another start")
    with pytest.raises(ValueError, match="cannot read"):
        second_rank("copy", TrainConfig(), {"data": "a"})


def test_a_rank_with_other_settings_or_data_is_refused_and_the_difference_named(second_rank):
    config = TrainConfig()
    config.checkpoint.every = 7
    with pytest.raises(ValueError, match=r"than rank 0 \(checkpoint.every: 10 -> 7; inputs.data: a -> b\)"):
        second_rank("first", config, {"data": "b"})


@pytest.fixture
def machines(tmp_path):
    arguments = [*make_run(tmp_path), "--threads", "1"]
    started = []

    def start(*run_dirs: Path) -> list[subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meeting = f"localhost:{free.getsockname()[1]}"
        launcher = ["-m", "torch.distributed.run", "--nnodes", str(len(run_dirs)), "--nproc_per_node", "1"]
        launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", meeting, "--shutdown-timeout", "100"]
        new = [
            subprocess.Popen(
                [sys.executable, *launcher, str(TRAIN), *arguments, "--run_dir", str(run_dir)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=ENVIRONMENT,
                start_new_session=True,
            )
            for run_dir in run_dirs
        ]
        started.extend(new)
        return new

    yield start
    for each in started:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)
            each.wait()


def outputs(processes: list[subprocess.Popen]) -> list[str]:
    return [each.communicate(timeout=240)[0] for each in processes]


@pytest.mark.slow
def test_two_machines_stop_after_the_same_step_at_ctrl_c_and_end_as_one_machine_does(machines, tmp_path):
    shared = tmp_path / "shared"
    pair = machines(shared, shared)
    deadline = time.monotonic() + 200
    while not (shared / "metrics.jsonl").exists() or (shared / "metrics.jsonl").read_text().count("\n") < 3:
        assert time.monotonic() < deadline and pair[0].poll() is None
        time.sleep(0.02)
    for each in pair:
        os.killpg(each.pid, signal.SIGINT)  # as a terminal does
    printed = "".join(outputs(pair))
    steps = [json.loads(line)["step"] for line in (shared / "metrics.jsonl").read_text().splitlines()]
    assert "SIGINT: finishing step" in printed and f"stopped after step {steps[-1]}; the same command resumes there" in printed
    assert steps[-1] < 6 and (shared / "checkpoints" / f"step-{steps[-1]}").exists()

    pair = machines(shared, shared)
    printed = "".join(outputs(pair))
    assert [each.returncode for each in pair] == [0, 0], printed
    assert f"resuming after step {steps[-1]}" in printed

    [alone] = machines(tmp_path / "alone")
    printed = "".join(outputs([alone]))
    assert alone.returncode == 0, printed
    for one, two in zip(read(tmp_path / "alone"), read(shared), strict=True):
        assert one["reward/mean"] == two["reward/mean"]
        assert two["loss/pg_loss"] == pytest.approx(one["loss/pg_loss"], rel=1e-3, abs=1e-6)


def read(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_machines_without_a_shared_disk_are_refused_before_anything_is_computed(machines, tmp_path):
    pair = machines(tmp_path / "here", tmp_path / "there")
    for printed in outputs(pair):
        assert "error: rank 1 on " in printed and "give a run_dir on a disk that all machines share" in printed
    assert not (tmp_path / "here" / "metrics.jsonl").exists()
