"""Signals to real processes: a step is finished, all ranks stop after the same one, a second request ends everything at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memrl.training.graceful_stop import SAME_REQUEST_S

from .workers import stopping as worker

SCRIPT = Path(worker.__file__)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


class Launched:
    def __init__(self, folder: Path, mode: str, ranks: int):
        self.folder, self.ranks = folder, ranks
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        self.process = subprocess.Popen(
            [sys.executable, *launcher, str(SCRIPT), str(folder), mode], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while any(self.read(rank, "step") < step for rank in range(self.ranks)):
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def read(self, rank: int, name: str) -> int:
        path = self.folder / f"{rank}.{name}"
        return int(path.read_text() or -1) if path.exists() else -1

    def finish(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors


@pytest.fixture
def launch(tmp_path):
    started = []

    def launch(mode: str, ranks: int = 1) -> Launched:
        started.append(Launched(tmp_path, mode, ranks))
        return started[0]

    yield launch
    for each in started:
        if each.process.poll() is None:
            each.process.terminate()  # torchrun takes its workers along
            each.process.wait(60)


def test_a_signal_lets_the_step_be_finished(launch):
    run = launch("steps")
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGINT)
    assert run.finish()[0] == 130
    assert run.read(0, "done") == run.read(0, "step") >= 2


def test_before_the_first_step_a_signal_ends_the_process_at_once(launch):
    run = launch("start")
    run.wait_for_step(0)
    run.process.send_signal(signal.SIGTERM)
    code, errors = run.finish()
    assert code == 143 and "stopped at once; start again" in errors


def test_one_request_that_arrives_twice_is_one_request(launch):
    run = launch("steps")
    run.wait_for_step(2)
    for _ in range(3):
        run.process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    code, errors = run.finish()
    assert code == 143 and run.read(0, "done") >= 2
    assert errors.count("finishing step") == 1 and "at once;" not in errors


BETWEEN_STEPS = """
import os, signal, sys, time
from memrl.engine import distributed
from memrl.training.graceful_stop import GracefulStop
stop = GracefulStop("start again")
distributed.init("cpu")
stop.begin_step(3)
stop.agreed()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.5)
stop.end()
distributed.shutdown()
sys.exit(stop.exit_code)
"""


def test_a_signal_after_the_last_step_does_not_promise_to_finish_one():
    command = [sys.executable, "-c", BETWEEN_STEPS]
    run = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=SCRIPT.parents[2])
    assert run.returncode == 0
    assert "SIGTERM: stopping once a step is saved" in run.stderr and "finishing step" not in run.stderr


def test_what_ends_a_forked_child_does_not_stop_its_parent(launch):
    run = launch("fork")
    assert run.finish()[0] == 0
    assert run.read(0, "done") == 5


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_both_after_the_same_step(launch):
    run = launch("steps", ranks=2)
    run.wait_for_step(2)
    os.kill(run.read(1, "pid"), signal.SIGINT)
    errors = run.finish()[1]
    assert run.read(0, "done") == run.read(1, "done") >= 2
    assert errors.count("finishing step") == 1 and "exitcode  : 130" in errors


def test_torchrun_told_to_stop_lets_its_ranks_finish_the_step(launch):
    run = launch("steps", ranks=2)
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGTERM)
    errors = run.finish()[1]
    assert run.read(0, "done") == run.read(1, "done") >= 2
    assert errors.count("finishing step") == 1 and "at once;" not in errors


@pytest.mark.slow
def test_a_second_signal_ends_a_rank_that_waits_for_another(launch):
    run = launch("wait", ranks=2)
    run.wait_for_step(1)
    time.sleep(1)  # rank 0 is in the collective, where no Python code runs
    os.kill(run.read(0, "pid"), signal.SIGINT)
    time.sleep(SAME_REQUEST_S + 0.5)
    os.kill(run.read(0, "pid"), signal.SIGINT)
    errors = run.finish()[1]
    assert "finishing step 1" in errors and "stopped at once" in errors
    assert run.read(0, "done") == -1
