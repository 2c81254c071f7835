"""Append-only JSON lines files that survive a kill at any moment, and reading them while they grow."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from memrl.utils.bounded_files import bounded_int, reading
from memrl.utils.files import free_name, link_or_copy, replacing

if TYPE_CHECKING:
    from typing_extensions import Self

LINE_BYTES = 24 * 2**20  # of a run's log; the longest real ones, rollouts of documents of a million tokens, have 5 MB
SAMPLE_BYTES = 2**29  # of any line; a sample that is written to a data set has at most half of it


class Journal:
    """A JSON lines file that is only appended to; a context manager.

    A line has left the process when `append` returns, so a kill tears at most the line being written. Reading cuts a torn last
    line off, so that the next line starts on a line of its own.
    """

    def __init__(self, path: str | os.PathLike[str], busy: str | None = None):
        """
        Args:
            busy: lock the file until it is closed; the error message if another process holds the lock. None: no lock.

        Raises:
            ValueError: another process holds the lock.
        """
        self.path = Path(path)
        self._file = open(self.path, "a+b") if busy is None else open_locked(self.path, busy)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def check_own(self, start: bytes) -> None:
        """Raise ValueError unless the file is empty or begins with `start`: no other kind of file is cut or appended to."""
        self._file.seek(0)
        if not start.startswith(self._file.read(len(start))):
            raise ValueError(f"{self.path}: exists and was not written by this command; delete it or choose another name")

    def append(self, record: Mapping[str, Any] | bytes) -> None:
        """Append an object, or a line that ends in a line end, and hand it to the operating system."""
        self._file.write(record if isinstance(record, bytes) else encode_line(record))
        self._file.flush()

    def sync(self) -> None:
        """Have the operating system put all lines on the disk now."""
        os.fsync(self._file.fileno())

    def read_lines(self, is_whole: Callable[[bytes], bool] = lambda line: True) -> Iterator[bytes]:
        """All lines in order, with their line ends; to be exhausted before the next `append`.

        A torn last line is cut off the file; so is the first line that is not `is_whole`, with everything after it.
        """
        self._file.seek(0)
        end = 0
        while line := self._file.readline(SAMPLE_BYTES):
            if len(line) == SAMPLE_BYTES:
                raise ValueError(f"{self.path}: a line is longer than {SAMPLE_BYTES >> 20} MiB, so this command did not write it")
            if not (line.endswith(b"\n") and is_whole(line)):
                self.truncate(end)
                return
            yield line
            end += len(line)

    def read(self, advice: str, check: Callable[[dict[str, Any]], object] = lambda record: None) -> Iterator[dict[str, Any]]:
        """All objects in order, as `read_lines`.

        Args:
            advice: what a user can do about a damaged line, for the error message.
            check: raises ValueError, KeyError or TypeError if the object is none of this file's.

        Raises:
            ValueError: a damaged line; names file and line.
        """
        for number, line in enumerate(self.read_lines(), start=1):
            try:
                record = parse_line(line)
                check(record)
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{self.path}: line {number} is damaged; {advice}") from None
            yield record

    def truncate(self, size: int = 0) -> None:
        """Cut the file after `size` bytes."""
        self._file.seek(size)
        self._file.truncate()

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replace the whole content; a kill leaves the old or the new one. A lock stays with the old file."""
        target = self.path.resolve()
        with replacing(target) as file:
            file.writelines(lines)
        self._file.close()
        self._file = open(target, "a+b")

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> Path | None:
        """Keep only the lines of `wanted` objects, and drop damaged ones: no object, too long, or `wanted` raises an error.

        Returns:
            A copy of the file as it was, if a line other than a torn last one was damaged.
        """
        target = self.path.resolve()
        is_damaged = is_tail = False
        self._file.seek(0)
        with replacing(target) as file:
            while line := self._file.readline(LINE_BYTES):
                is_whole = line.endswith(b"\n")
                try:
                    if is_tail or len(line) == LINE_BYTES:
                        raise ValueError("is too long")
                    if is_whole and wanted(parse_line(line)):
                        file.write(line)
                except (ValueError, KeyError, TypeError):
                    is_damaged = True
                is_tail = not is_whole
            spare = free_name(target.with_name(f"{target.name}.damaged")) if is_damaged else None
            if spare is not None:
                link_or_copy(target, spare)
        self._file.close()
        self._file = open(target, "a+b")
        return spare


def encode_line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode("ascii") + b"\n"


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The first setting of a file's header that differs from a command's, for an error message; "" if none does."""
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            return f"{name} {json.dumps(old.get(name))[:60]} instead of {json.dumps(new.get(name))[:60]}"
    return ""


def parse_line(line: bytes) -> dict[str, Any]:
    """The object of a line.

    Raises:
        ValueError: the rest of a sentence that begins with file and line: "is not JSON", for example.
    """
    try:
        record = json.loads(line, parse_int=bounded_int)
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(record, dict):
        raise ValueError("is not a JSON object")
    return record


def read_records(path: str | Path) -> list[tuple[int, dict]]:
    """The objects of a JSON lines file with their line numbers, from 1; another process may be writing it.

    A torn last line is left out. The file is not changed.

    Raises:
        ValueError: no such file, or a damaged line; names file and line.
    """
    records = []
    with reading(path) as file:
        for number, line in enumerate(iter(partial(file.readline, LINE_BYTES), b""), start=1):
            if not line.strip():
                continue
            try:
                if len(line) == LINE_BYTES:
                    raise ValueError(f"is longer than {LINE_BYTES >> 20} MiB")
                records.append((number, parse_line(line)))
            except ValueError as error:
                if not line.endswith(b"\n") and len(line) < LINE_BYTES:
                    break
                raise ValueError(f"{path}: line {number} {error}") from None
    return records


def open_locked(path: Path, busy: str) -> BinaryIO:
    """Open a file for appending and reading, locked until it is closed. Without locks in the file system it is only opened.

    Raises:
        ValueError: `busy`; another process holds the lock.
    """
    file = open(path, "a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(busy) from None
    except OSError:  # this file system has no locks
        pass
    return file
