"""The results folder: rows as they come, safe against a kill at any moment, never of mixed settings.

    eval_config.json   what the rows depend on
    samples.jsonl      one row per line, written when its document is finished

A later command may add lengths, samples and tasks; with anything else changed it is refused. What failed is
run again: the machine may have been the reason. Of two lines about one document the later one counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memrl.agents.memory import AgentConfig
from memrl.config import flatten
from memrl.evaluation.runner import Key, Row, row_key
from memrl.files import fingerprint as fingerprint_files
from memrl.files import write_whole

if TYPE_CHECKING:
    from memrl.evaluation.tasks import Task

CONFIG_FILE, SAMPLES_FILE = "eval_config.json", "samples.jsonl"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


class Results:
    """An open results folder; a context manager.

    Attributes:
        rows: the last row of every key in the folder, those of earlier commands included.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any], *, resume: bool = True):
        """
        Args:
            settings: see `fingerprint`; a folder with rows made with others is refused.
            resume: False refuses a folder that already holds results.

        Raises:
            ValueError: refused, a damaged file, or another process is writing there.
        """
        self.folder = Path(folder)
        self.path = self.folder / SAMPLES_FILE
        self.rows: dict[Key, Row] = {}
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder; give another --out")
        if not resume and self.path.exists() and self.path.stat().st_size:
            raise ValueError(f"{self.folder} already holds results; give another --out, delete it, or use --resume auto")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        try:
            self._lock()
            self._take_up(dict(settings))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def finished(self) -> set[Key]:
        """What need not be run again: rows without an error."""
        return {key for key, row in self.rows.items() if row["error"] is None}

    def add(self, row: Row) -> None:
        """Append a row. It has left this process on return: a kill can tear only the line being written."""
        if self.rows.get(row_key(row)) == row:
            return  # it failed again in the same way: the file need not grow with every command
        line = json.dumps(row, ensure_ascii=True) + "\n"
        self._file.write(line.encode("ascii"))
        self._file.flush()
        self.rows[row_key(row)] = row

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is writing to {self.folder}; wait for it, or give another --out") from None

    def _take_up(self, settings: dict[str, Any]) -> None:
        config_path = self.folder / CONFIG_FILE
        has_rows = self.path.stat().st_size > 0  # settings that produced nothing bind nobody
        if has_rows and config_path.exists():
            try:
                old = json.loads(config_path.read_text(encoding="utf-8"))
            except ValueError:
                raise ValueError(f"{config_path} is damaged; delete {self.folder} or give another --out") from None
            _check_same(self.folder, old, settings)
            settings["tasks"] = old["tasks"] | settings["tasks"]
        elif has_rows:
            raise ValueError(f"{self.path} exists without {CONFIG_FILE}; delete it or give another --out")
        write_whole(config_path, json.dumps(settings, indent=2) + "\n")
        self._read_rows()

    def _read_rows(self) -> None:
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.path, whole)  # a kill tore the last line: its document is read again
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                row = json.loads(line)
                row["error"]  # every row has it, and what is run again depends on it
                self.rows[row_key(row)] = row
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{self.path} line {number} is damaged; delete that line, and it is run again") from None


def fingerprint(
    model: str | Path,
    agent: AgentConfig,
    decoding: Any,
    dtype: str,
    seed: int,
    tasks: list[Task],
    method: str = "memory",
) -> dict[str, Any]:
    """All that a row depends on, as JSON; weights and tokenizer by hash, `model_path` is not compared.

    Args:
        decoding: a `memrl.llm.Decoding`.
    """
    model = Path(model)
    return {
        "model_path": str(model.resolve()),
        "weights": fingerprint_files(sorted(model.glob("*.safetensors"))),
        "tokenizer": fingerprint_files([model / name for name in _TOKENIZER_FILES if (model / name).is_file()]),
        "dtype": dtype,
        "method": method,
        "agent": asdict(agent),
        "decoding": asdict(decoding),
        "seed": seed,
        "tasks": {task.name: task.version for task in tasks},
    }


def _check_same(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    before, now = flatten(old), flatten(new)
    tasks_in_both = {f"tasks.{name}" for name in old.get("tasks", {}) if name in new["tasks"]}
    keys = {key for key in before.keys() | now.keys() if not key.startswith(("tasks.", "model_path"))}
    differ = [
        f"{key} ({_short(before.get(key))} there, {_short(now.get(key))} now)"
        for key in sorted(keys | tasks_in_both)
        if before.get(key) != now.get(key)
    ]
    if differ:
        raise ValueError(
            f"{folder} holds results made with other settings: {', '.join(differ)}; give another --out, or the same settings"
        )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
