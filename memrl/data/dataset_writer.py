"""Writing a data set that takes long to make: resumable, and the same bytes from run to run.

Rows go to a journal beside the target, `.NAME.partial.jsonl`, a line each as they come; its first line is the recipe. A kill
leaves at most one torn line, and the same command goes on behind the last whole one. When all rows are there, the target is
written beside itself and renamed: it appears whole or not at all. `NAME.recipe.json` keeps the recipe and the target's SHA-256:
the same command finds its work done, and any other is refused instead of replacing the file.
"""

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from memrl.data.custom import FIELDS, check_row
from memrl.types import Sample
from memrl.utils.files import sync_path, write_whole
from memrl.utils.progress import Progress

SUFFIXES = (".jsonl", ".parquet")


def to_row(sample: Sample) -> dict[str, Any]:
    """The sample in the custom format (`memrl.data.custom`), the document last; `match` only where it is "all".

    Raises:
        ValueError: the metadata has a name that is a field of the format.
    """
    if taken := sorted(sample.metadata.keys() & set(FIELDS)):
        raise ValueError(f"metadata: {taken[0]!r} is a field of the format; choose another name")
    match = {} if sample.match == "any" else {"match": sample.match}
    row = {"id": sample.id, "question": sample.question, "answers": list(sample.answers), **match}
    return {**row, **sample.metadata, "context": sample.context}


def write_samples(
    path: str | os.PathLike[str], make: Callable[[int], Sample], count: int, recipe: dict[str, Any], label: str
) -> None:
    """Write the samples make(0) ... make(count - 1), in order, as a .jsonl or .parquet file, with progress on standard error.

    Memory holds one sample, and for parquet one row group of 16 MiB (or of one larger row). Parquet's bytes depend on the version
    of pyarrow, which writes it into the file.

    Args:
        make: a function of its argument and of what `recipe` names, alone; after an interruption it is called for the rest only.
        recipe: JSON-able; all that the samples depend on, input files by `memrl.utils.files.fingerprint`.
        label: one word for the progress line.

    Raises:
        ValueError: another suffix, a sample that the format cannot hold, an id twice, a target that exists and was not made by
            this recipe, or one that another process is writing.
        OSError: the disk is full, or whatever else the system says; the same call goes on afterwards.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: has to end in {' or '.join(SUFFIXES)}")
    about = {"recipe": json.loads(json.dumps(recipe)), "samples": count}
    if path.exists():
        _check_made(path, about)
        _journal_path(path).unlink(missing_ok=True)  # left by a kill right behind the rename
        print(f"{path}: was made by the same command already", file=sys.stderr)
        return
    rows = _Rows(path)
    with _open_journal(path) as journal:
        done = _take_up(journal, about, rows)
        try:
            with Progress(label, count, "samples", start=done) as progress:
                for index in range(done, count):
                    line = _encode(path, index, make(index))
                    rows.add(line)
                    journal.write(line)
                    journal.flush()
                    progress.advance()
            _finish(path, journal, about, rows)
        finally:
            if path.exists() or not rows.numbers:
                _journal_path(path).unlink(missing_ok=True)


class _Rows:
    """What has to be known of all rows before the target can be written: that ids differ, and parquet's columns."""

    def __init__(self, path: Path):
        self.path = path
        self.numbers: dict[str, int] = {}
        self.columns = None
        if path.suffix == ".parquet":
            from memrl.data.columns import Columns

            self.columns = Columns()

    def add(self, line: bytes) -> None:
        row = json.loads(line)
        number = len(self.numbers) + 1
        if row["id"] in self.numbers:
            problem = f"{row['id']!r} is the id of sample {self.numbers[row['id']]} too; ids must be unique"
            raise ValueError(f"{self.path}: sample {number}: id: {problem}")
        self.numbers[row["id"]] = number
        if self.columns is not None:
            self.columns.add(row)


def _encode(path: Path, index: int, sample: Sample) -> bytes:
    try:
        row = to_row(sample)
        check_row(row, path.parent, set())
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: sample {index + 1}: {error}") from None


# --- the journal --------------------------------------------------------------------------------------------


def _journal_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial.jsonl")


def _open_journal(path: Path) -> BinaryIO:
    journal = open(_journal_path(path), "a+b")
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        journal.close()
        raise ValueError(f"{path}: another process is writing it; wait for that, or choose another name") from None
    return journal


def _take_up(journal: BinaryIO, about: dict[str, Any], rows: _Rows) -> int:
    """Go on with the journal of an interrupted run, or begin one; returns how many rows it has, and leaves it at its end."""
    header = json.dumps(about).encode() + b"\n"
    journal.seek(0)
    found = journal.readline()
    if found != header:
        if found.endswith(b"\n"):
            print(f"{journal.name}: was left by a command with other settings; begins anew", file=sys.stderr)
        journal.truncate(0)
        journal.write(header)
        journal.flush()
        return 0
    end = journal.tell()
    for line in journal:
        if not _is_whole(line):
            break
        rows.add(line)
        end += len(line)
    journal.seek(end)
    journal.truncate()
    return len(rows.numbers)


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:  # where the power failed, a line can have its end and still not be what was written
        return False
    return line.endswith(b"\n")


def _rows_of(journal: BinaryIO) -> Iterator[bytes]:
    journal.seek(0)
    journal.readline()
    yield from journal


# --- the target ---------------------------------------------------------------------------------------------


def _recipe_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.recipe.json")


def _finish(path: Path, journal: BinaryIO, about: dict[str, Any], rows: _Rows) -> None:
    fresh = path.with_name(f".{path.name}.new")
    try:
        if rows.columns is None:
            with open(fresh, "wb") as file:
                journal.seek(0)
                journal.readline()
                shutil.copyfileobj(journal, file, 2**20)
        else:
            from memrl.data.columns import write_parquet

            write_parquet(fresh, _rows_of(journal), rows.columns.schema())
        sync_path(fresh)
        # Before the target: a target without a recipe would be refused when the command is run again.
        write_whole(_recipe_path(path), json.dumps({**about, "sha256": _sha256(fresh)}, indent=2, ensure_ascii=False) + "\n")
        os.replace(fresh, path)
        sync_path(path.absolute().parent)
    finally:
        fresh.unlink(missing_ok=True)


def _check_made(path: Path, about: dict[str, Any]) -> None:
    """Raise ValueError unless the file is the one that the recipe makes."""
    try:
        made = dict(json.loads(_recipe_path(path).read_text(encoding="utf-8")))
        digest = made.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: exists, and nothing tells how it was made; delete it or choose another name") from None
    if made != about:
        raise ValueError(f"{path}: exists and was made otherwise ({_difference(made, about)}); delete it or choose another name")
    if digest != _sha256(path):
        raise ValueError(f"{path}: has changed since it was made; delete it or choose another name")


def _difference(made: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The first setting that differs, for a message."""
    made, wanted = {**made.get("recipe", {}), "samples": made.get("samples")}, {**wanted["recipe"], "samples": wanted["samples"]}
    for name in sorted(made.keys() | wanted.keys()):
        if made.get(name) != wanted.get(name):
            return f"{name} {json.dumps(made.get(name))[:60]} instead of {json.dumps(wanted.get(name))[:60]}"
    return "in another order"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
