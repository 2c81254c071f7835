"""`train.py` on a disk that is full for one rank when it saves one step. Run by tests/test_training.py.

SMALL_DISK=RANK:STEP [torchrun --nproc_per_node 2] train_small_disk.py ARGUMENTS OF train.py
"""

import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memrl.commands import train
from memrl.engine import distributed
from memrl.training.checkpoint import RunFolder

LARGEST_FILE = 8192  # bytes; a write beyond fails with EFBIG, as one on a full disk does with ENOSPC


def fill_disk(full_rank: int, full_step: int) -> None:
    save = RunFolder.save

    def save_on_a_small_disk(self, engine, step, *arguments):
        if (distributed.rank(), step) == (full_rank, full_step):
            resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, resource.RLIM_INFINITY))
        save(self, engine, step, *arguments)

    RunFolder.save = save_on_a_small_disk


if __name__ == "__main__":
    fill_disk(*map(int, os.environ["SMALL_DISK"].split(":")))
    sys.exit(train.main(sys.argv[1:]))
