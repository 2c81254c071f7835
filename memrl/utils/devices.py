"""Device, threads and memory of this process. Torch is imported by the first call, so that importing this is quick."""

import os
import resource
import sys


def pick_device(name: str = "auto"):
    """A torch.device; `auto` is the first GPU, or the CPU without one.

    Raises:
        ValueError: an unknown name, or a GPU that this machine or this PyTorch does not have.
    """
    import torch

    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdecimal())):
        raise ValueError(f"device is {name!r}; allowed are auto, cpu, cuda and cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "auto":
        return torch.device("cuda" if count else "cpu")
    if kind == "cuda" and not count:
        raise ValueError(f"device is {name!r}, but PyTorch {torch.__version__} finds no GPU; use --device cpu")
    if index and int(index) >= count:
        raise ValueError(f"device is {name!r}, but there are only {count} GPUs: cuda:0 to cuda:{count - 1}")
    return torch.device(name)


def set_threads(count: int) -> None:
    """Set the CPU threads of this process; 0 is PyTorch's choice, or under torchrun this rank's share of the cores."""
    import torch

    if not count and "LOCAL_WORLD_SIZE" in os.environ:  # torchrun's default is one thread per rank
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"]))
    if count:
        torch.set_num_threads(count)


def peak_gib() -> float:
    """Peak memory so far in GiB: of the GPU if one is used, else of this process."""
    gpu = _gpu_gib()
    return round(_process_gib() if gpu is None else gpu, 3)


def peak_memory() -> str:
    """Peak memory of this process, such as `1.3 GiB`, and of its GPU."""
    gpu = _gpu_gib()
    return f"{_process_gib():.2f} GiB" + ("" if gpu is None else f" + {gpu:.2f} GiB on the GPU")


def _gpu_gib() -> float | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch.cuda.max_memory_reserved() / 2**30


def _process_gib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
