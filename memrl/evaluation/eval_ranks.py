"""The processes of torchrun that share an evaluation, or the only one.

They talk twice: rank 0 says what is left to do, and at the end it waits for the others. All that lies between is each rank's own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TypeVar

T = TypeVar("T")

# Ranks end apart by what their last documents take: hours of waiting are no sign of a hang, and a dead rank is torchrun's matter.
BARRIER_TIMEOUT = timedelta(days=30)
# All else is quick. A rank whose torchrun was killed meanwhile waits for others that never come.
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is; a context manager.

    Attributes:
        rank, world: of all machines.
        local_rank, local_world: of this machine.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def of_environment(cls) -> Ranks:
        """As torchrun told this process; the only one where nobody did."""
        names = {"rank": "RANK", "world": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_world": "LOCAL_WORLD_SIZE"}
        return cls(**{name: int(os.environ[variable]) for name, variable in names.items() if variable in os.environ})

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, on every rank. Collective.

        Raises:
            ValueError: `make` raised one; on every rank, so that all of them end in the same way.
            ConnectionError: the ranks do not find each other; `make` has not been called then.
        """
        if self.world == 1:
            return make()
        dist = _connect()
        _patient()
        value, mistake = None, None
        if self.rank == 0:
            try:
                value = make()
            except (ValueError, OSError) as error:
                mistake = str(error)
        self.wait()  # while `make` hashes the weights
        box = [value, mistake]
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            raise ValueError(box[1])
        return box[0]

    def wait(self) -> None:
        """Until every rank is here. Collective.

        Raises:
            ConnectionError: one has ended.
        """
        if self.world > 1:
            with _failures("another rank of torchrun has ended"):
                _connect().barrier(group=_patient())

    def close(self) -> None:
        if self.world > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

    def device(self, name: str) -> str:
        """The device of this rank, given the one of the command line: each rank of a machine has a GPU of its own.

        Raises:
            ValueError: more ranks than GPUs, or a device that ranks cannot share.
        """
        here = self.local_world
        if here == 1 or name == "cpu":
            return name
        if name not in ("auto", "cuda"):
            raise ValueError(f"device is {name!r}, which {here} ranks of torchrun cannot share; give auto, cuda or cpu")
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            return name
        if here > count:
            raise ValueError(f"{here} ranks share the {count} GPUs of this machine; start with --nproc_per_node {count}")
        return f"cuda:{self.local_rank}"


def _connect():
    """torch.distributed, joined over the CPU: what is said here are words, and GPUs may be busy."""
    import torch.distributed as dist

    if not dist.is_initialized():
        with _failures("the ranks of torchrun do not find each other"):
            dist.init_process_group("gloo", timeout=TIMEOUT)
    return dist


@cache
def _patient():
    """All ranks as a group that waits as long as a barrier may take."""
    with _failures("the ranks of torchrun do not find each other"):
        return _connect().new_group(timeout=BARRIER_TIMEOUT)


@contextlib.contextmanager
def _failures(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"{what} ({' '.join(str(error).split())[:200]})") from error
