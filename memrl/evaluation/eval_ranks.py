"""The torchrun processes that share an evaluation, or a single process.

They communicate twice: rank 0 sends the list of missing readings, and at the end it waits for the others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

# The last documents of the ranks can differ by hours, so long waiting is no sign of a hang; torchrun detects a dead rank.
BARRIER_TIMEOUT = timedelta(days=30)
# Everything else is quick. The limit ends a rank that waits for others that never start.
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Ranks:
    """This process's number and the number of processes: over all machines, and on this one."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def of_environment(cls) -> Ranks:
        """Read torchrun's variables; a single process without them."""
        names = {"rank": "RANK", "world": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_world": "LOCAL_WORLD_SIZE"}
        return cls(**{name: int(os.environ[variable]) for name, variable in names.items() if variable in os.environ})

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 and return its result on every rank. Collective.

        Raises:
            ValueError: `make` raised one, or an OSError; on every rank, so that all of them end in the same way.
            ConnectionError: the ranks do not find each other; `make` has not been called then.
        """
        if self.world == 1:
            return make()
        import torch.distributed as dist

        _connect()
        box: list[Any] = [None, None]  # result, error message
        if self.rank == 0:
            try:
                box[0] = make()
            except (ValueError, OSError) as error:
                box[1] = str(error)
        self.wait()  # `make` hashes the weights, which can take longer than TIMEOUT
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            raise ValueError(box[1])
        return box[0]

    def wait(self) -> None:
        """Wait until every rank has called this. Collective.

        Raises:
            ConnectionError: one has ended.
        """
        if self.world > 1:
            import torch.distributed as dist

            group = _connect()
            with _failures("another rank of torchrun has ended"):
                dist.barrier(group=group)

    def close(self) -> None:
        if self.world > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

    def device(self, name: str) -> str:
        """The device of this rank, from the one on the command line: each rank of a machine has its own GPU.

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


@cache
def _connect() -> Any:  # torch's stubs include an int, which only processes outside of the group get
    """Connect the ranks over the CPU: the messages are small, and GPUs may be busy. Returns a group with a barrier's timeout."""
    import torch.distributed as dist

    with _failures("the ranks of torchrun do not find each other"):
        dist.init_process_group("gloo", timeout=TIMEOUT)
        return dist.new_group(timeout=BARRIER_TIMEOUT)


@contextlib.contextmanager
def _failures(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"{what} ({' '.join(str(error).split())[:200]})") from error
