"""A folder of evaluation results: rows are appended as they come and survive a kill at any moment; settings are never mixed.

    eval_config.json     the settings that the rows depend on
    samples.jsonl        one row per line, written when its reading ends
    samples.rankN.jsonl  the same from torchrun's rank N > 0; rank 0 moves its rows to samples.jsonl at the end or the next start
    .lock                locked while a command writes to the folder

A later command may add lengths, samples, repeats, tasks and methods; any other change is refused. Failed readings run again,
because the machine may have been the reason. If two lines have the same key, the later one counts, and the earlier one is removed
when a command starts or ends. A kill neither loses nor doubles a row: a torn line is read again, and rows left in a rank's file
are moved again, identified by their keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memrl.evaluation.eval_settings import join
from memrl.evaluation.row_check import check_row
from memrl.evaluation.runner import Key, Row, row_key
from memrl.utils.bounded_files import read_json
from memrl.utils.files import write_whole
from memrl.utils.journal import Journal, encode_line, open_locked

CONFIG_FILE, SAMPLES_FILE, LOCK_FILE = "eval_config.json", "samples.jsonl", ".lock"
SUMMARY_FILE, PICTURE_FILE = "summary.json", "accuracy.png"
MEASURED = ("seconds", "peak_gib")  # may differ from run to run
ADVICE = "delete that line, and its document is read again"


class Results:
    """An open results folder; a context manager.

    Attributes:
        rows: the last row of every key in the folder, those of earlier commands included.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any], *, resume: bool = True):
        """
        Args:
            settings: see `memrl.evaluation.eval_settings.fingerprint`; a folder with rows of other settings is refused.
            resume: False refuses a folder that already holds results.

        Raises:
            ValueError: a refused folder, a damaged file, or another process is writing to the folder.
        """
        self.folder = Path(folder)
        self.path = self.folder / SAMPLES_FILE
        self.rows: dict[Key, Row] = {}
        self._num_lines = 0
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder; give another --out")
        if not resume and self._holds_rows():
            raise ValueError(f"{self.folder} already holds results; give another --out, delete it, or use --resume auto")
        self._check_own()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open_locked(self.folder / LOCK_FILE, _busy(self.folder))
        self._journal = Journal(self.path)
        try:
            self._resume(dict(settings))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._journal.close()
        self._lock.close()

    @property
    def finished(self) -> set[Key]:
        """Keys of the rows without an error, which need not run again."""
        return {key for key, row in self.rows.items() if row["error"] is None}

    def add(self, row: Row) -> None:
        """Append a row; it survives a kill of this process from here on."""
        key = row_key(row)
        if key in self.rows and _same(self.rows[key], row):
            return  # the same failure again: the file should not grow with every command
        self._journal.append(row)
        self.rows[key] = row
        self._num_lines += 1

    def collect(self) -> None:
        """Move the rows of the other ranks' files to samples.jsonl, and leave one line per key in it.

        Raises:
            ValueError: a damaged line, or a rank of an earlier command is still writing.
        """
        for path in sorted(self.folder.glob(_rank_file("*"))):
            with Journal(path, _busy(self.folder)) as journal:
                for row in journal.read(ADVICE, check_row):
                    if self.rows.get(row_key(row), {"error": ""})["error"] is not None:  # rows without an error stay
                        self.add(row)
                self._journal.sync()
                path.unlink()
        if self._num_lines > len(self.rows):
            self._journal.replace(map(encode_line, self.rows.values()))
            self._num_lines = len(self.rows)

    def _holds_rows(self) -> bool:
        return any(path.stat().st_size for path in (self.path, *self.folder.glob(_rank_file("*"))) if path.exists())

    def _check_own(self) -> None:
        """Refuse a folder in which files with the names of ours are not ours: a command would replace or cut them."""
        config_path = self.folder / CONFIG_FILE
        names = (SAMPLES_FILE, _rank_file("*"), SUMMARY_FILE, PICTURE_FILE)
        others = [path for name in names for path in sorted(self.folder.glob(name)) if path.stat().st_size]
        if not config_path.exists() and others:
            raise ValueError(f"{others[0]} exists without {CONFIG_FILE}; delete it or give another --out")
        if config_path.exists():
            read_config(self.folder)

    def _resume(self, settings: dict[str, Any]) -> None:
        if self._holds_rows():  # without rows, new settings may replace the old ones
            settings = join(self.folder, read_config(self.folder), settings)
        config_path = self.folder / CONFIG_FILE
        write_whole(config_path, json.dumps(settings, indent=2) + "\n")
        for row in self._journal.read(ADVICE, check_row):
            self.rows[row_key(row)] = row
            self._num_lines += 1
        self.collect()


def read_config(folder: Path) -> dict[str, Any]:
    """The settings of a results folder.

    Raises:
        ValueError: they cannot be read, or the file holds something else.
    """
    path = folder / CONFIG_FILE
    try:
        config = read_json(path)
    except ValueError:
        config = None
    if not isinstance(config, dict) or not all(isinstance(config.get(name), dict) for name in ("methods", "tasks")):
        raise ValueError(f"{path} is damaged, or not of `memrl eval`; delete it with its rows, or give another --out")
    return config


class RankResults(Journal):
    """The rows of a torchrun rank above 0 until rank 0 collects them; a context manager."""

    def __init__(self, folder: str | Path, rank: int):
        """
        Raises:
            ValueError: the folder made by rank 0 is not visible here, or another process writes this rank's rows.
        """
        if not Path(folder).is_dir():
            raise ValueError(f"rank {rank} finds no folder {folder}; give an --out on a disk that all machines share")
        super().__init__(Path(folder) / _rank_file(rank), _busy(Path(folder)))

    def add(self, row: Row) -> None:
        """Append a row; it survives a kill of this process from here on."""
        self.append(row)


def _rank_file(rank: int | str) -> str:
    return f"samples.rank{rank}.jsonl"


def _same(a: Row, b: Row) -> bool:
    return a.keys() == b.keys() and all(a[name] == b[name] for name in a if name not in MEASURED)


def _busy(folder: Path) -> str:
    return f"another process is writing to {folder}; wait for it, or give another --out"
