"""Read the tensors of safetensors files with little memory besides the tensors themselves.

The safetensors library maps a file into memory, and touched pages count as the process's memory until the file is unmapped, so a
loader that copies from the map needs every shard twice. Here the bytes are read directly into the target tensor, or through a
small buffer if its dtype or device differs.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from memrl.model.hf_config import CheckpointError

BUFFER_BYTES = 64 * 2**20
HEADER_BYTES = (
    16 * 2**20
)  # the library allows 100 MB, which take seconds and gigabytes to parse; a real one has 100 bytes a tensor
AGAIN = "download or copy it again"
_STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor: `start` in bytes from the beginning of the file, `dtype` as safetensors names it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    num_bytes: int


def list_tensors(file: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file, in file order; CheckpointError if the file is not a complete safetensors file."""
    with file.open("rb") as source:
        start = source.read(40)
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{file} is a Git LFS pointer, not weights; run `git lfs pull`")
    header_bytes = int.from_bytes(start[:8], "little")
    if header_bytes > HEADER_BYTES:
        raise CheckpointError(f"{file} is damaged (its header would have {header_bytes} bytes); {AGAIN}")
    try:
        with safe_open(file, framework="pt", device="cpu"):
            pass  # the library checks the header, the offsets and the file's length
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or cut short ({error}); {AGAIN}") from None
    with file.open("rb") as source:
        source.seek(8)
        header = json.loads(source.read(header_bytes))
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        start = 8 + header_bytes + begin
        found.append(StoredTensor(file, name, tuple(entry["shape"]), entry["dtype"], start, end - begin))
    return sorted(found, key=lambda tensor: tensor.start)


class WeightReader:
    """Reads stored tensors one by one through one buffer; `on_bytes` is called with the size of every part read."""

    def __init__(self, on_bytes: Callable[[int], None] = lambda count: None):
        self.on_bytes = on_bytes
        self._buffer: Tensor | None = None

    def read(self, stored: StoredTensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """A new tensor, rounded to dtype; CheckpointError for quantised or not finite values and a truncated file."""
        if stored.dtype not in _STORED:
            raise CheckpointError(
                f"{stored.file} stores {stored.name} as {stored.dtype}, which is not supported (allowed: "
                f"{', '.join(_STORED)}); use the unquantised checkpoint"
            )
        target = torch.empty(stored.shape, dtype=dtype, device=device)
        flat, file_type = target.view(-1), _STORED[stored.dtype]
        direct = file_type == dtype and target.device.type == "cpu"
        step = BUFFER_BYTES // file_type.itemsize
        with stored.file.open("rb", buffering=0) as source:
            source.seek(stored.start)
            for begin in range(0, flat.numel(), step):
                part = flat[begin : begin + step]
                if direct:
                    _fill(part, source, stored)
                else:
                    piece = self._staging(target.is_cuda)[: len(part) * file_type.itemsize].view(file_type)
                    _fill(piece, source, stored)
                    part.copy_(piece)
                _check_finite(part, stored)
                self.on_bytes(len(part) * file_type.itemsize)
        return target

    def _staging(self, pinned: bool) -> Tensor:
        if self._buffer is None or self._buffer.is_pinned() != pinned:
            self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=pinned)
        return self._buffer


def _check_finite(part: Tensor, stored: StoredTensor) -> None:
    """CheckpointError for NaN and infinity: with one such weight every answer would be wrong, without any error."""
    if not all(math.isfinite(bound) for bound in part.aminmax()):  # both are NaN if one value is; much faster than isfinite
        kind = str(part.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{stored.file} holds a weight in {stored.name} that is not a finite {kind} number; the model was damaged, or its "
            "training diverged: take another checkpoint, or another dtype if the number is only too large for this one"
        )


def _fill(tensor: Tensor, source, stored: StoredTensor) -> None:
    """Fill the tensor's memory from the file."""
    remaining = tensor.view(torch.uint8).numpy().data
    while len(remaining):
        count = source.readinto(remaining)
        if not count:
            raise CheckpointError(f"{stored.file} ended within {stored.name} while it was read; {AGAIN}")
        remaining = remaining[count:]
