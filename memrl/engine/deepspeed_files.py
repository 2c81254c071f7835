"""DeepSpeed's checkpoint files, written so that a rank whose disk is full does not leave the others waiting for it.

DeepSpeed's save_checkpoint has barriers after its writes. A rank that raises in a write never comes to them, and the others
wait until the time limit of the process group. Here a write that fails is noted, the rank goes through the barriers, and raises
after them.
"""

from pathlib import Path

from memrl.utils.files import sync_path

TAG = "engine"  # DeepSpeed's name for the one checkpoint in a folder


class _NotingWriter:
    """DeepSpeed's checkpoint engine, except that `save` flushes to the disk and notes what went wrong instead of raising it."""

    def __init__(self, writer):
        self._writer = writer
        self.failures: list[Exception] = []

    def __getattr__(self, name: str):
        return getattr(self._writer, name)

    def save(self, state_dict, path) -> None:
        try:
            self._writer.save(state_dict, path)
            sync_path(Path(path))  # by the rank that wrote it: its machine holds what is not on the disk yet
        except Exception as error:  # torch raises OSError or RuntimeError, by the moment at which the disk is full
            self.failures.append(error)


def save_deepspeed(engine, folder: Path, **options) -> None:
    """`engine.save_checkpoint` of a DeepSpeed engine into `folder`; collective over ranks.

    Args:
        options: further arguments of save_checkpoint.

    Raises:
        Exception: what the first failed write of this rank raised, after all ranks are through.
    """
    writer = engine.checkpoint_engine
    engine.checkpoint_engine = noting = _NotingWriter(writer)
    # Rank 0 copies two scripts beside the files, unguarded and before the last barrier.
    engine._copy_recovery_script = lambda folder: None
    try:
        engine.save_checkpoint(str(folder), tag=TAG, save_latest=False, **options)
    finally:
        engine.checkpoint_engine = writer
    if noting.failures:
        raise noting.failures[0]
