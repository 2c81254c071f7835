"""Communication between ranks, with the same functions for one rank and for many."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from memrl.utils.devices import pick_device

T = TypeVar("T")

# Ranks wait for each other after rollouts of unequal length and while rank 0 writes, which takes minutes without any fault.
TIMEOUT = timedelta(hours=6)

_device: torch.device | None = None


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def device() -> torch.device:
    """The device of this rank, its own GPU or the CPU: the one chosen by `init`; before it, the default."""
    return _device or _choose_device("auto")


def _choose_device(name: str) -> torch.device:
    if pick_device(name).type == "cpu":
        return torch.device("cpu")
    ranks_here, count = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks_here > count:
        raise ValueError(f"{ranks_here} ranks share the {count} GPUs of this machine; start with --nproc_per_node {count}")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def init(device_name: str = "auto") -> None:
    """Connect to the other ranks of torchrun; without torchrun this is the only rank.

    Args:
        device_name: "auto", "cpu" or "cuda".

    Raises:
        ValueError: "cuda" without a GPU, or more ranks than GPUs.
    """
    global _device
    _device = _choose_device(device_name)
    if "RANK" not in os.environ:
        # DeepSpeed reads these; the port is never opened.
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    if device().type == "cuda":
        torch.cuda.set_device(device())
    if not dist.is_initialized():
        backend = "nccl" if device().type == "cuda" else "gloo"
        if world_size() == 1:  # no other rank to meet, so no port that another process may have taken
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # documented, but missing in torch's __all__
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
        else:
            dist.init_process_group(backend, timeout=TIMEOUT)


def barrier() -> None:
    dist.barrier()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Element-wise sum, on every rank; any dtype, any shape. The result is on the CPU."""
    total = values.to(device())
    dist.all_reduce(total)
    return total.cpu()


def max_over_ranks(value: int) -> int:
    largest = torch.tensor([value], device=device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def from_rank_0(value: T) -> T:
    """Rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=device())
    return box[0]


def done_by_rank_0(work: Callable[[], T]) -> T:
    """The result of `work`, which only rank 0 does, on every rank; its ValueError or OSError as a ValueError on every rank."""
    result, problem = [], None
    if rank() == 0:
        try:
            result = [work()]
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        except ValueError as error:
            problem = str(error)
    result, problem = from_rank_0((result, problem))
    if problem is not None:
        raise ValueError(problem)
    return result[0]


def once_per_machine(work: Callable[[], T]) -> T:
    """The result of `work` on the first rank of this machine. Collective over ranks."""
    machine = os.environ.get("GROUP_RANK", "0")
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    return dict(gather_lists([(machine, work())] if first else []))[machine]


def gather_lists(items: list[T]) -> list[T]:
    """All ranks' lists joined in the order of the ranks, on every rank."""
    parts: list[list[T]] = [[] for _ in range(world_size())]
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def shutdown() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
