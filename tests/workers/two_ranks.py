"""Run by tests/test_distributed.py on 2 ranks: what its tests need of two ranks, in one launch.

torchrun --nproc_per_node 2 two_ranks.py OUT.pt INPUTS MICRO_BATCH_TOKENS PERSISTENCE_THRESHOLD ORDER MODEL_FOLDER [...]
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memrl.engine import distributed
from tests.workers.gradients import gradients_of_cases
from tests.workers.partitioned_start import compare_all
from tests.workers.whole_runs import whole_runs


def main(out: str, inputs: str, gradient_arguments: list[int], folders: list[str]) -> None:
    torch.set_num_threads(1)
    distributed.init("cpu")
    result = {"gradients": gradients_of_cases(*gradient_arguments), "start": compare_all(folders)}
    rank = distributed.rank()
    result |= whole_runs(Path(inputs))
    if rank == 0:
        torch.save(result, out)
    distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:3], [int(argument) for argument in sys.argv[3:6]], sys.argv[6:])
