"""Write files whole or not at all, read and fingerprint them, flush them to the disk."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

_BLOCK, _SAMPLES = 2**20, 64


def write_whole(path: str | Path, text: str) -> None:
    """Write a UTF-8 file so that a kill or a full disk leaves the whole old or the whole new file.

    A link stays a link; a pipe or /dev/stdout is written to directly. A lone surrogate, which a model can sample but UTF-8 cannot
    encode, is written as an escape.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    fresh = target.with_name(f".{target.name}.new")
    with open(fresh, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, target)


def read_whole(path: str | Path) -> bytes:
    """The bytes of a file; raises ValueError naming the path if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def fingerprint(files: Iterable[str | Path]) -> str:
    """A hash of the files' names, sizes and contents; of a file above 64 MiB, only 64 evenly spaced MiB are read."""
    digest = hashlib.sha256()
    for path in map(Path, files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(size * index // _SAMPLES)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:16]


def sync_path(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        sync_path(path)
    sync_path(folder)
