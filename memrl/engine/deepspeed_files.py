"""Write DeepSpeed's checkpoint files; a rank with a full disk raises only after the barriers, so the other ranks do not hang.

DeepSpeed's save_checkpoint has barriers after its writes. A rank that raises in a write never reaches them, and the others wait
until the time limit of the process group. Here a failed write is recorded, the rank passes the barriers, and raises afterwards.
"""

from pathlib import Path

from memrl.utils.files import sync_path

TAG = "engine"  # DeepSpeed's name for the one checkpoint in a folder


class _RecordingWriter:
    """DeepSpeed's checkpoint engine, except that `save` flushes to the disk and records errors instead of raising them."""

    def __init__(self, writer):
        self._writer = writer
        self.failures: list[Exception] = []

    def __getattr__(self, name: str):
        return getattr(self._writer, name)

    def save(self, state_dict, path) -> None:
        try:
            self._writer.save(state_dict, path)
            sync_path(Path(path))  # on the rank that wrote it: the unwritten pages are in its machine's memory
        except Exception as error:  # torch raises OSError or RuntimeError, depending on when the disk is full
            self.failures.append(error)


def save_deepspeed(engine, folder: Path, **options) -> None:
    """`engine.save_checkpoint` of a DeepSpeed engine into `folder`; collective over ranks.

    Args:
        options: further arguments of save_checkpoint.

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
