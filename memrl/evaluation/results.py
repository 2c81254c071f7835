"""The results folder: rows as they come, safe against a kill at any moment, never of mixed settings.

    eval_config.json     what the rows depend on
    samples.jsonl        one row per line, written when its reading ends
    samples.rankN.jsonl  the same of torchrun's rank N > 0; rank 0 moves the rows into samples.jsonl at the end or the next start
    .lock                held while a command writes here

A later command may add lengths, samples, repeats, tasks and methods; with anything else changed it is refused. What failed is run
again: the machine may have been the reason. Of two lines about one reading the later one counts, and the earlier one is taken out
when a command starts or ends. Nothing is lost or doubled wherever a kill falls: a line that is torn is read again, rows that a
rank's file still holds are moved again, and each is told by its key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from memrl.evaluation.eval_settings import join
from memrl.evaluation.runner import Key, Row, row_key
from memrl.utils.files import write_whole

CONFIG_FILE, SAMPLES_FILE, LOCK_FILE = "eval_config.json", "samples.jsonl", ".lock"
MEASURED = ("seconds", "peak_gib")  # differ from run to run where nothing else does


class Results:
    """An open results folder; a context manager.

    Attributes:
        rows: the last row of every key in the folder, those of earlier commands included.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any], *, resume: bool = True):
        """
        Args:
            settings: see `memrl.evaluation.eval_settings.fingerprint`; a folder with rows made with others is refused.
            resume: False refuses a folder that already holds results.

        Raises:
            ValueError: refused, a damaged file, or another process is writing there.
        """
        self.folder = Path(folder)
        self.path = self.folder / SAMPLES_FILE
        self.rows: dict[Key, Row] = {}
        self._num_lines = 0
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder; give another --out")
        if not resume and self._holds_rows():
            raise ValueError(f"{self.folder} already holds results; give another --out, delete it, or use --resume auto")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] | None = None
        self._lock = _locked(self.folder / LOCK_FILE)
        try:
            self._take_up(dict(settings))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._lock.close()

    @property
    def finished(self) -> set[Key]:
        """What need not be run again: rows without an error."""
        return {key for key, row in self.rows.items() if row["error"] is None}

    def add(self, row: Row) -> None:
        """Append a row. It has left this process on return: a kill can tear only the line being written."""
        key = row_key(row)
        if key in self.rows and _same(self.rows[key], row):
            return  # it failed again in the same way: the file need not grow with every command
        _write(self._file, row)
        self.rows[key] = row
        self._num_lines += 1

    def collect(self) -> None:
        """Move the rows of the other ranks' files into samples.jsonl, and leave one line per key in it.

        Raises:
            ValueError: a damaged line, or a rank of an earlier command still writes.
        """
        for path in sorted(self.folder.glob(_rank_file("*"))):
            with _locked(path):
                for row in _read_rows(path):
                    if self.rows.get(row_key(row), {"error": ""})["error"] is not None:  # one that went well stays
                        self.add(row)
                os.fsync(self._file.fileno())
                path.unlink()
        if self._num_lines > len(self.rows):
            self._rewrite()

    def _holds_rows(self) -> bool:
        return any(path.stat().st_size for path in (self.path, *self.folder.glob(_rank_file("*"))) if path.exists())

    def _take_up(self, settings: dict[str, Any]) -> None:
        config_path = self.folder / CONFIG_FILE
        if self._holds_rows():  # settings that produced nothing bind nobody
            if not config_path.exists():
                raise ValueError(f"{self.path} exists without {CONFIG_FILE}; delete it or give another --out")
            try:
                old = json.loads(config_path.read_text(encoding="utf-8"))
                settings = join(self.folder, old, settings)
            except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, TypeError):
                raise ValueError(f"{config_path} is damaged; delete {self.folder} or give another --out") from None
        write_whole(config_path, json.dumps(settings, indent=2) + "\n")
        self._file = self.path.open("ab")
        for row in _read_rows(self.path, repair=True):
            self.rows[row_key(row)] = row
            self._num_lines += 1
        self.collect()

    def _rewrite(self) -> None:
        fresh = self.path.with_name(f".{self.path.name}.new")
        with fresh.open("wb") as file:
            for row in self.rows.values():
                _write(file, row)
            os.fsync(file.fileno())
        os.replace(fresh, self.path)
        self._file.close()
        self._file = self.path.open("ab")
        self._num_lines = len(self.rows)


class RankResults:
    """The rows of one of torchrun's ranks above 0, until rank 0 collects them; a context manager."""

    def __init__(self, folder: str | Path, rank: int):
        """
        Raises:
            ValueError: the folder that rank 0 made is not here, or another process writes this rank's rows.
        """
        if not Path(folder).is_dir():
            raise ValueError(f"rank {rank} finds no folder {folder}; give an --out on a disk that all machines share")
        self._file = _locked(Path(folder) / _rank_file(rank))

    def __enter__(self) -> RankResults:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def add(self, row: Row) -> None:
        """Append a row; like `Results.add`."""
        _write(self._file, row)


def _rank_file(rank: int | str) -> str:
    return f"samples.rank{rank}.jsonl"


def _write(file: IO[bytes], row: Row) -> None:
    file.write((json.dumps(row, ensure_ascii=True) + "\n").encode("ascii"))
    file.flush()


def _same(a: Row, b: Row) -> bool:
    return a.keys() == b.keys() and all(a[name] == b[name] for name in a if name not in MEASURED)


def _read_rows(path: Path, repair: bool = False) -> Iterator[Row]:
    """The rows of a file in order, without a torn last line; `repair` cuts that off, so that lines can follow."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):  # a kill tore it: its document is read again
                if repair:
                    os.truncate(path, file.tell() - len(line))
                return
            try:
                row = json.loads(line)
                row["error"]  # every row has it, and what is run again depends on it
                row_key(row)
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path} line {number} is damaged; delete that line, and it is run again") from None
            yield row


def _locked(path: Path) -> IO[bytes]:
    """The file, opened to append to it and locked until it is closed.

    Raises:
        ValueError: another process has it.
    """
    file = path.open("ab")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # not on Windows
        pass
    except BlockingIOError:
        file.close()
        raise ValueError(f"another process is writing to {path.parent}; wait for it, or give another --out") from None
    except OSError:  # a file system without locks
        pass
    return file
