"""Write and read DeepSpeed's checkpoint files: a failed write hangs no other rank, and reading a file runs no code of its own.

DeepSpeed's save_checkpoint has barriers after its writes. A rank that raises in a write never reaches them, and the others wait
until the time limit of the process group. Here a failed write is recorded, the rank passes the barriers, and raises afterwards.

The files are pickles, which can name any function to be called, and DeepSpeed loads them as such. Here torch reads them with its
own unpickler, which builds tensors, plain values and the three classes below.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from memrl.utils.files import sync_path

TAG = "engine"  # DeepSpeed's name for the one checkpoint in a folder
FORCE_TENSORS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch.load obeys it whatever its caller asks for


class _RecordingWriter:
    """DeepSpeed's checkpoint engine, except that `save` flushes to the disk and records errors instead of raising them."""

    def __init__(self, writer):
        self._writer = writer
        self.written: list[Path] = []
        self.failures: list[Exception] = []

    def __getattr__(self, name: str):
        return getattr(self._writer, name)

    def save(self, state_dict, path) -> None:
        try:
            self._writer.save(state_dict, path)
            sync_path(Path(path))  # on the rank that wrote it: the unwritten pages are in its machine's memory
            self.written.append(Path(path))
        except Exception as error:  # torch raises OSError or RuntimeError, depending on when the disk is full
            self.failures.append(error)


def save_deepspeed(engine, folder: Path, **options) -> list[Path]:
    """`engine.save_checkpoint` of a DeepSpeed engine into `folder`; collective over ranks.

    Args:
        options: further arguments of save_checkpoint.

    Returns:
        The files that this rank wrote.

    Raises:
        Exception: that of this rank's first failed write, after all ranks have finished.
    """
    writer = engine.checkpoint_engine
    engine.checkpoint_engine = recording = _RecordingWriter(writer)
    # Without this, rank 0 would copy two scripts beside the files before the last barrier, and could fail there.
    engine._copy_recovery_script = lambda folder: None
    try:
        engine.save_checkpoint(str(folder), tag=TAG, save_latest=False, **options)
    finally:
        engine.checkpoint_engine = writer
    if recording.failures:
        raise recording.failures[0]
    return recording.written


@contextmanager
def only_tensors() -> Iterator[None]:
    """In this block every torch.load, those within DeepSpeed too, refuses files that hold more than tensors and plain values.

    Raises:
        ValueError: a file names something else to be called or built.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get(FORCE_TENSORS)
    os.environ[FORCE_TENSORS] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            yield
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":
            raise
        name = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"a file holds {name[1]}, which is no tensor; loading it could run code" if name else "a file is no list of tensors"
        ) from error
    finally:
        if before is None:
            del os.environ[FORCE_TENSORS]
        else:
            os.environ[FORCE_TENSORS] = before
