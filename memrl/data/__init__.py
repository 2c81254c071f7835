"""Samples: where they come from and how they are written down.

`custom` reads the JSON lines format and `parquet` parquet files, `dataset_writer` writes both, `needle` generates the documents
of the miniature, and `training_source` chooses what a training step reads. All that is exported here imports the standard
library only, and pyarrow for a parquet file, so reading a data set does not wait for torch.
"""

import glob
import os
from pathlib import Path

from memrl.data.custom import JsonlSamples, Samples
from memrl.data.dataset_writer import to_row, write_samples

__all__ = ["JsonlSamples", "Samples", "load_samples", "to_row", "write_samples"]


def load_samples(
    path: str | os.PathLike[str], allow_files: bool = False, hotpotqa: str | os.PathLike[str] | None = None
) -> Samples:
    """Open and check a data set: a JSON lines file, a parquet file, or several parquet files as one, in the order of their names.

    Args:
        path: a file; or a folder with parquet files; or a pattern such as `data/train-*.parquet`. A file that does not end in
            .parquet is read as JSON lines, or as a JSON list.
        allow_files: read documents that rows name by `file` from anywhere, not only from below the data set's folder.
        hotpotqa: the HotpotQA file that the original's longest evaluation files refer to (`memrl.data.original`).

    Raises:
        ValueError: it cannot be read; the message names file, line or row, field and what is allowed.
    """
    path = Path(path)
    shards = [path]
    if path.is_dir():
        shards = sorted(path.glob("*.parquet"))
    elif glob.has_magic(str(path)) and not path.exists():
        shards = [Path(name) for name in sorted(glob.glob(str(path)))]
    if not shards:
        raise ValueError(f"{path}: no parquet file is there; give a .jsonl or .parquet file, or a folder of .parquet files")
    if len(shards) == 1 and shards[0].suffix != ".parquet":
        return JsonlSamples(shards[0], allow_files, hotpotqa)

    from memrl.data.parquet import ParquetSamples

    return ParquetSamples(shards, allow_files)
