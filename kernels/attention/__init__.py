"""Attention backends: `base.AttentionBackend` is their interface, `pick_attention` chooses one."""

import importlib

import torch

from memrl.kernels.attention.base import AttentionBackend, merge_into
from memrl.kernels.attention.batched import EagerAttention, SdpaAttention
from memrl.kernels.attention.flash import FlashAttention
from memrl.kernels.attention.triton_backend import TritonAttention, interpreted

__all__ = ["ATTENTION_NAMES", "AttentionBackend", "SdpaAttention", "merge_into", "pick_attention"]

BACKENDS = {backend.name: backend for backend in (EagerAttention, SdpaAttention, FlashAttention, TritonAttention)}
ATTENTION_NAMES = ("auto", *BACKENDS)


def pick_attention(name: str, device: torch.device | str, dtype: torch.dtype) -> tuple[AttentionBackend, str]:
    """The backend of that name, or for "auto" the best one for the device; and the reason, as text for people.

    "auto" never picks Triton: our kernels were run in Triton's interpreter, and compiled, but not yet run on a GPU.

    Raises:
        ValueError: the backend does not exist or cannot run here.
    """
    device = torch.device(device)
    if name == "auto":
        if device.type != "cuda":
            return SdpaAttention(), "PyTorch's fused attention; flash-attn and Triton need a GPU"
        obstacle = _flash_obstacle(device, dtype)
        if obstacle:
            return SdpaAttention(), f"PyTorch's fused attention; {obstacle}"
        return FlashAttention(), "flash-attn, the fastest for 16-bit weights on this GPU"
    if name not in BACKENDS:
        raise ValueError(f"attention {name!r} is unknown; allowed: {', '.join(ATTENTION_NAMES)}")
    obstacles = {"flash": _flash_obstacle, "triton": _triton_obstacle}
    obstacle = obstacles[name](device, dtype) if name in obstacles else None
    if obstacle:
        raise ValueError(f"attention {name!r} cannot run here: {obstacle}; 'auto' picks one that can")
    return BACKENDS[name](), "chosen by the settings"


def _flash_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"flash-attn needs a CUDA device, not {device}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn needs float16 or bfloat16, not {_short(dtype)}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"flash-attn needs a GPU of compute capability 8.0 or above, this GPU has {major}.{minor}"
    return _import_obstacle("flash_attn", "flash-attn", "pip install --no-build-isolation -r requirements-gpu.txt")


def _triton_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return f"Triton needs a CUDA device, not {device} (or TRITON_INTERPRET=1, for tests)"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"our Triton kernels need float16, bfloat16 or float32, not {_short(dtype)}"
    return _import_obstacle("triton", "Triton", "PyTorch's CUDA builds include it")


def _import_obstacle(module: str, title: str, fix: str) -> str | None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            return f"{title} is not installed; {fix}"
        return f"{title} cannot be imported ({error})"
    except (ImportError, OSError) as error:  # usually built for another PyTorch version
        return f"{title} cannot be imported ({error}); {fix}"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
