"""Write a data set that takes long to make: resumable, and with the same bytes each time.

Rows are appended to a journal beside the target, `.NAME.partial.jsonl`, as they are made; its first line is the recipe. A kill
tears at most one line, and the same command continues after the last whole one. When all rows are there, the target is written
under another name and renamed, so it appears whole or not at all. `NAME.recipe.json` keeps the recipe and the target's SHA-256:
the same command finds its work done, and another command is refused instead of replacing the file.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from memrl.data.rows import FIELDS, check_row, check_unique
from memrl.types import Sample
from memrl.utils.bounded_files import read_json
from memrl.utils.files import sync_path, write_whole
from memrl.utils.journal import Journal, encode_line, first_difference
from memrl.utils.progress import Progress

SUFFIXES = (".jsonl", ".parquet")


def to_row(sample: Sample) -> dict[str, Any]:
    """The sample in the custom format (`memrl.data.custom`), the document last; `match` only if it is "all".

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
    of pyarrow, which writes its version into the file.

    Args:
        make: depends on its argument and on the contents of `recipe` alone; called only for the rows that are missing.
        recipe: JSON-able; everything that the samples depend on, input files by `memrl.utils.files.fingerprint`.
        label: one word for the progress line.

    Raises:
        ValueError: another suffix, a sample that the format cannot hold, a repeated id, an existing target that this recipe did
            not make, or a target that another process is writing.
        OSError: a full disk or another error of the system; the same call continues afterwards.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: has to end in {' or '.join(SUFFIXES)}")
    about = {"recipe": json.loads(json.dumps(recipe)), "samples": count}
    if path.exists():
        _check_made(path, about)
        _journal_path(path).unlink(missing_ok=True)  # left by a kill after the rename
        print(f"{path}: exists already, made by the same command", file=sys.stderr)
        return
    if _recipe_path(path).exists() and _read_recipe(path) is None:
        raise ValueError(f"{_recipe_path(path)}: exists and is no recipe of a data set; delete it or choose another name")
    numbers: dict[str, str] = {}  # of the samples, by id
    busy = f"{path}: another process is writing it; wait for that, or choose another name"
    with Journal(_journal_path(path), busy) as journal:
        _resume(journal, about, numbers)
        done = len(numbers)
        try:
            with Progress(label, count, "samples", start=done) as progress:
                for index in range(done, count):
                    journal.append(_encode(path, index, make(index), numbers))
                    progress.advance()
            _finish(path, journal, about)
        finally:
            if path.exists() or not numbers:
                _journal_path(path).unlink(missing_ok=True)


def _encode(path: Path, index: int, sample: Sample, numbers: dict[str, str]) -> bytes:
    try:
        row = to_row(sample)
        check_row(row, path.parent)
        line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        check_unique(sample.id, f"sample {index + 1}", numbers)
        return line
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: sample {index + 1}: {error}") from None


# --- the journal --------------------------------------------------------------------------------------------


def _journal_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial.jsonl")


def _resume(journal: Journal, about: dict[str, Any], numbers: dict[str, str]) -> None:
    """Continue the journal of an interrupted run or start it over; adds its rows to `numbers`."""
    journal.check_own(b'{"recipe": ')
    lines = journal.read_lines(_is_whole)
    header = encode_line(about)
    found = next(lines, None)
    if found != header:
        if found is not None:
            print(f"{journal.path}: was left by a command with other settings; starting over", file=sys.stderr)
        journal.truncate()
        journal.append(header)
        return
    for number, line in enumerate(lines, start=1):
        numbers[json.loads(line)["id"]] = f"sample {number}"


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:  # after a power failure a line can end in a line end and still be damaged
        return False
    return True


# --- the target ---------------------------------------------------------------------------------------------


def _recipe_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.recipe.json")


def _finish(path: Path, journal: Journal, about: dict[str, Any]) -> None:
    fresh = path.with_name(f".{path.name}.new")

    def lines() -> Iterator[bytes]:
        return islice(journal.read_lines(), 1, None)

    fresh.unlink(missing_ok=True)  # left by a kill; a link with this name must not be followed
    try:
        if path.suffix == ".parquet":
            from memrl.data.columns import schema_of, write_parquet

            write_parquet(fresh, lines(), schema_of(lines()))
        else:
            with open(fresh, "xb") as file:
                file.writelines(lines())
        sync_path(fresh)
        # Before the target: the same command would refuse a target without a recipe.
        write_whole(_recipe_path(path), json.dumps({**about, "sha256": hash_files([fresh])}, indent=2, ensure_ascii=False) + "\n")
        os.replace(fresh, path)
        sync_path(path.absolute().parent)
    finally:
        fresh.unlink(missing_ok=True)


def _read_recipe(path: Path) -> dict[str, Any] | None:
    """What is written about a data set: recipe, samples, sha256; None if there is no such file."""
    try:
        made = read_json(_recipe_path(path))
    except ValueError:
        return None
    is_recipe = isinstance(made, dict) and made.keys() == {"recipe", "samples", "sha256"} and isinstance(made["recipe"], dict)
    return made if is_recipe else None


def _check_made(path: Path, about: dict[str, Any]) -> None:
    """Raise ValueError unless the file is the one that the recipe makes."""
    problem, made = None, _read_recipe(path)
    if made is None:
        problem = f"exists, and {_recipe_path(path).name} does not tell how it was made"
    else:
        digest = made.pop("sha256")
        if made != about:
            old, new = ({**recipe["recipe"], "samples": recipe["samples"]} for recipe in (made, about))
            difference = first_difference(old, new) or "in another order"
            problem = f"exists and was made with other settings ({difference})"
        elif digest != hash_files([path]):
            problem = "has changed since it was made"
    if problem is not None:
        raise ValueError(f"{path}: {problem}; delete it or choose another name")


def hash_files(paths: Iterable[Path]) -> str:
    """SHA-256 of whole files, in this order: of a single file its own, of several theirs together with their names."""
    digests = []
    for path in paths:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(2**20):
                digest.update(block)
        digests.append(f"{path.name} {digest.hexdigest()}")
    return (
        digests[0].split()[-1]
        if len(digests) == 1
        else hashlib.sha256("\n".join(digests).encode("utf-8", "surrogateescape")).hexdigest()
    )
