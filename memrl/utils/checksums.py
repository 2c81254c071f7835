"""SHA-256 of whole files: of the files that a run depends on, and of all files of a folder to find later damage.

The sums of a folder are in its SHA256SUMS, in the format of the command `sha256sum`: `sha256sum -c SHA256SUMS` checks the same.
Hashing takes 0.6 s per GB and thread on a CPU with SHA instructions, and a folder's files are hashed by several threads.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from memrl.utils.bounded_files import read_bounded
from memrl.utils.files import write_whole

SUMS = "SHA256SUMS"
SUMS_BYTES = 16 * 2**20  # 100,000 files; a checkpoint has two for each rank and the model's shards
THREADS = 4


def sha256(path: Path) -> str:
    """The hash of a regular file in hexadecimal; OSError or ValueError if it is none or cannot be read."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is not a regular file")
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def hash_all(paths: Sequence[Path]) -> list[str]:
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(sha256, paths))


def hash_files(paths: Iterable[Path]) -> str:
    """One hash of the names and the contents of files, in this order."""
    files = list(paths)
    pairs = zip(files, hash_all(files), strict=True)
    return hashlib.sha256("".join(f"{digest}  {path.name}\n" for path, digest in pairs).encode(errors="replace")).hexdigest()[:16]


def write_sums(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Write SHA256SUMS of all files in `folder`; `known` are hashes that need not be taken again, by relative path."""
    known = known or {}
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    missing = [name for name in names if name not in known and name != SUMS]
    sums = {**known, **dict(zip(missing, hash_all([folder / name for name in missing]), strict=True))}
    write_whole(folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


def read_sums(folder: Path) -> dict[str, str]:
    """The hashes in SHA256SUMS by relative path; ValueError unless every byte of it is as `write_sums` writes it."""
    content = read_bounded(folder / SUMS, SUMS_BYTES).decode("utf-8", errors="replace")
    lines = content.split("\n")
    found = [re.fullmatch(r"([0-9a-f]{64})  (?!/)([^\\]+)", line) for line in lines[:-1]]
    sums = {match[2]: match[1] for match in found if match}
    if lines[-1] or len(sums) < max(1, len(found)) or any(".." in Path(name).parts for name in sums):
        raise ValueError(f"{folder / SUMS} is damaged")
    return sums


def damaged_files(folder: Path, sums: Mapping[str, str]) -> list[str]:
    """The files of `sums` whose content is another one, each with what is wrong."""

    def problem(name: str) -> str | None:
        try:
            return None if sha256(folder / name) == sums[name] else f"{name} differs from its checksum"
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, ValueError) as error:
            return f"{name} cannot be read ({getattr(error, 'strerror', None) or 'not a regular file'})"

    with ThreadPoolExecutor(THREADS) as threads:
        return [found for found in threads.map(problem, sums) if found]
