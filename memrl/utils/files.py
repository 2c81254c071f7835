"""Write files whole or not at all, read and fingerprint them, flush them to the disk."""

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any

_BLOCK, _SAMPLES = 2**20, 64
JSON_BYTES = 16 * 2**20  # the largest published file of this kind, DeepSeek-V3's index of 91,991 tensors, has 9 MB
JSON_DIGITS = 300  # of a whole number, so that it can become a float; tokenizer_config.json has numbers of 31 digits


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


def read_bounded(path: str | Path, limit: int) -> bytes:
    """The bytes of a regular file with at most `limit` bytes; ValueError naming the path for anything else.

    For files from elsewhere: a pipe would block, and a device could be read without end.
    """
    try:
        with open_regular(path) as file:
            content = file.read(limit + 1)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > limit:
        raise ValueError(f"{path} is larger than {limit / 2**20:g} MiB, which is too large for a file of this kind")
    return content


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading; ValueError naming the path for a pipe or a device, OSError as `open`."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} is a pipe or a device; it must be a regular file")
    return file


def read_json(path: str | Path, limit: int = JSON_BYTES) -> Any:
    """The value in a JSON file from elsewhere; ValueError naming the path if it is not JSON, or absurdly large or deep.

    A key that stands twice is refused: `json` would silently take the last one.
    """
    content = read_bounded(path, limit)
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_int=_bounded_int)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be read") from None
    except ValueError as error:  # undecodable bytes and JSON errors alike
        raise ValueError(f"{path} is not valid JSON ({error})") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in found if keys.count(key) > 1)!r} stands twice")
    return found


def _bounded_int(digits: str) -> int:
    if len(digits) > JSON_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


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
