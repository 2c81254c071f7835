"""Signals to real processes: a step is finished, all ranks stop after the same one, a second request ends everything at once."""

import multiprocessing
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
    """A worker, forked from a server that has imported torch, or torchrun with two workers."""

    def __init__(self, folder: Path, mode: str, ranks: int):
        self.folder, self.ranks = folder, ranks
        if ranks == 1:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([worker.__name__])
            self.process = context.Process(target=worker.run_alone, args=(folder, mode))
            self.process.start()
        else:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            with open(folder / "stderr", "w") as errors:
                command = [sys.executable, *launcher, str(SCRIPT), str(folder), mode]
                self.process = subprocess.Popen(command, stderr=errors, env=ENVIRONMENT)

    def poll(self) -> int | None:
        return self.process.exitcode if self.ranks == 1 else self.process.poll()

    def kill(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait_for(self, is_reached) -> None:
        deadline = time.monotonic() + 120
        while not is_reached():
            assert time.monotonic() < deadline, self.errors()
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.poll() is not None or all(self.read(rank, "step") >= step for rank in range(self.ranks)))
        assert self.poll() is None, self.errors()

    def read(self, rank: int, name: str) -> int:
        path = self.folder / f"{rank}.{name}"
        return int(path.read_text() or -1) if path.exists() else -1

    def errors(self) -> str:
        return (self.folder / "stderr").read_text()

    def finish(self) -> tuple[int, str]:
        self.wait_for(lambda: self.poll() is not None)
        return self.poll(), self.errors()


@pytest.fixture
def launch(tmp_path):
    started = []

    def launch(mode: str, ranks: int = 1) -> Launched:
        started.append(Launched(tmp_path, mode, ranks))
        return started[0]

    yield launch
    for each in started:
        if each.poll() is None:
            each.kill(signal.SIGTERM)  # torchrun stops its workers too
            each.finish()


def test_a_signal_lets_the_step_be_finished(launch):
    run = launch("steps")
    run.wait_for_step(2)
    run.kill(signal.SIGINT)
    assert run.finish()[0] == 130
    assert run.read(0, "done") == run.read(0, "step") >= 2


def test_before_the_first_step_a_signal_ends_the_process_at_once(launch):
    run = launch("start")
    run.wait_for_step(0)
    run.kill(signal.SIGTERM)
    code, errors = run.finish()
    assert code == 143 and "stopped at once; start again" in errors


def test_one_request_that_arrives_twice_is_one_request(launch):
    run = launch("steps")
    run.wait_for_step(2)
    for _ in range(3):
        run.kill(signal.SIGTERM)
        time.sleep(0.02)
    code, errors = run.finish()
    assert code == 143 and run.read(0, "done") >= 2
    assert errors.count("finishing step") == 1 and "at once;" not in errors


def test_a_signal_after_the_last_step_does_not_promise_to_finish_one(launch):
    code, errors = launch("between").finish()
    assert code == 0
    assert "SIGTERM: stopping once a step is saved" in errors and "finishing step" not in errors


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


def test_a_signal_to_torchrun_lets_its_ranks_finish_the_step(launch):
    run = launch("steps", ranks=2)
    run.wait_for_step(2)
    run.kill(signal.SIGTERM)
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
