"""Run by tests/test_stopping.py: steps of a fifth of a second until a signal. Writes FOLDER/RANK.pid, .step and .done.

torchrun --nproc_per_node 2 stopping.py FOLDER steps|start|wait|fork|between
"""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memrl.engine import distributed
from memrl.training.graceful_stop import GracefulStop


def main(folder: Path, mode: str) -> int:
    stop = GracefulStop("start again")
    distributed.init("cpu")
    rank = distributed.rank()
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    if mode == "start":
        (folder / f"{rank}.step").write_text("0")
        time.sleep(60)
    for step in range(1, 300):
        stop.step = step
        (folder / f"{rank}.step").write_text(str(step))
        time.sleep(12 if mode == "wait" and rank == 1 else 0.2)
        if mode == "fork" and step == 2:
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()
            child.terminate()
            child.join()
        is_stopping = stop.agreed()
        if mode == "between":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
            break
        if is_stopping or (mode == "fork" and step == 5):
            (folder / f"{rank}.done").write_text(str(step))
            break
    stop.step = None
    distributed.shutdown()
    return stop.exit_code


def run_alone(folder: Path, mode: str) -> None:
    """A single rank, as a child process: standard error goes to FOLDER/stderr."""
    os.dup2(os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY), 2)
    sys.exit(main(folder, mode))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
