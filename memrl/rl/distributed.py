"""The few things that ranks tell each other, the same for one rank and for many."""

import os
import socket
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def device() -> torch.device:
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")


def init() -> None:
    """Join the other ranks of torchrun, or be the only one."""
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    if device().type == "cuda":
        torch.cuda.set_device(device())
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device().type == "cuda" else "gloo")


def barrier() -> None:
    dist.barrier()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Element-wise sum, on every rank; fp64 [n] in and out."""
    total = values.to(device())
    dist.all_reduce(total)
    return total.cpu()


def max_over_ranks(value: int) -> int:
    largest = torch.tensor([value], device=device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def gather_lists(items: list[T]) -> list[T]:
    """The ranks' lists, one after the other, on every rank."""
    parts: list[list[T]] = [[] for _ in range(world_size())]
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def shutdown() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
