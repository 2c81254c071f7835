"""Write files whole or not at all, read and fingerprint them, flush them to the disk."""

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_BLOCK, _SAMPLES = 2**20, 64


def write_whole(path: str | Path, text: str) -> None:
    """Write a UTF-8 file so that a kill or a full disk leaves the whole old or the whole new file.

    A link stays a link; a pipe or /dev/stdout is written to directly. A lone surrogate, which a model can sample but UTF-8 cannot
    encode, is written as an escape.
    """
    target = Path(os.path.realpath(path))
    content = text.encode("utf-8", errors="backslashreplace")
    if target.exists() and not target.is_file():
        Path(path).write_bytes(content)
        return
    with replacing(target) as file:
        file.write(content)


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A new file for `target`'s content, flushed and renamed to it at the end of the block; a failure leaves no trace.

    Its name is random and must be new, so a link that someone planted is never followed. It has the old file's permissions.
    """
    fresh = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}.new")
    file = os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "wb")
    try:
        with file:
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, target)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def free_name(path: Path) -> Path:
    """`path`, or if something has that name PATH-2, PATH-3 and so on."""
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """A hard link, or a copy if the disk has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def check_output(path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
    """Raise ValueError if writing `path` would destroy one of `inputs` or a file of a model.

    Args:
        inputs: files and folders that the command reads, and its other outputs; a file counts under all its names (links).
    """
    target = Path(os.path.realpath(path))
    for source in map(Path, inputs):
        files = [source, *source.iterdir()] if source.is_dir() else [source]
        if any(_is_same_file(target, file) for file in files):
            raise ValueError(f"{path}: is an input or another output of this command; choose another name")
    if target.is_file() and (target.parent / "config.json").exists() and any(target.parent.glob("*.safetensors")):
        raise ValueError(f"{path}: is a file in the model folder {target.parent}; choose another name")


PAGE_MARK = b'<meta name="generator" content="memrl">'  # in the head of every web page


def check_own_output(path: Path, mark: bytes) -> None:
    """Raise ValueError if `path` is a file of another kind than this command writes: `mark` is not among its first bytes."""
    if path.is_file() and path.stat().st_size:
        with open(path, "rb") as file:
            if mark not in file.read(4096):
                raise ValueError(f"{path}: exists and was not written by this command; delete it or choose another name")


def _is_same_file(target: Path, other: Path) -> bool:
    return target == Path(os.path.realpath(other)) or (target.exists() and other.exists() and target.samefile(other))


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
