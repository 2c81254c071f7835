"""Read and check parquet files of samples, with memrl's own columns or those of MemAgent's published training data.

    own         question string, context or file string, answers list<string> or string; optional id, match;
                other columns are metadata (null: the sample has none of that name)
    original's  prompt list<{role, content}>, context string, reward_model {ground_truth: string or list<string>};
                optional extra_info {index: the id}; other columns are metadata

The fields have the same meaning and the same checks as in JSON lines (`memrl.data.custom`); rows count from 1. Documents are read
in windows of several rows, and the last windows are kept. A row group can only be read from its beginning: reading in order is
fast for any file, reading at random only if row groups are small, as those written by `memrl.data.columns`.
"""

import json
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from memrl.data.columns import JSON_COLUMN
from memrl.data.custom import (
    FIELDS,
    REQUIRED,
    Samples,
    check_answers,
    check_row,
    check_unchanged,
    default_id,
    describe,
    file_stamp,
    row_id,
    row_sample,
)
from memrl.types import Sample

WINDOW_BYTES = 2**25  # of a window; a larger row is a window of its own
CACHED_WINDOWS = 2
PANDAS_INDEX = "__index_level_"
ORIGINAL_COLUMNS = ("prompt", "reward_model", "context")


class Group(NamedTuple):
    """One row group of one file."""

    path: Path
    number: int
    first: int  # index of its first row among all samples
    first_in_file: int
    window_rows: int


class Window(NamedTuple):
    """Rows that were read together."""

    first: int
    table: pa.RecordBatch


class ParquetSamples(Samples):
    """The samples of one or several parquet files with the same columns, in order."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]]):
        paths = [Path(path) for path in paths]
        super().__init__(paths[0] if len(paths) == 1 else paths[0].parent)
        self._stamps = {path: file_stamp(path) for path in paths}
        self._schemas: dict[Path, pa.Schema] = {}
        self._original: dict[Path, bool] = {}
        self._groups: list[Group] = []
        self._forget()
        documents: set[Path] = set()
        rows: dict[str, str] = {}
        for path in paths:
            self._open(path, len(self), documents, rows)
        if not self.ids:
            raise ValueError(f"{self.name}: no samples; a row needs {REQUIRED}")
        self.paths = [*paths, *sorted(documents)]
        self._starts = [group.first for group in self._groups]

    # --- checking -------------------------------------------------------------------------------------------

    def _open(self, path: Path, first: int, documents: set[Path], rows: dict[str, str]) -> None:
        """Check a file and note its row groups. `rows`: id -> file and row, for error messages."""
        with _readable(path):
            file = _parquet_file(path)
        self._schemas[path] = file.schema_arrow
        self._original[path] = _is_original(path, file.schema_arrow)
        checked = (*ORIGINAL_COLUMNS, "extra_info") if self._original[path] else FIELDS
        columns = [name for name in file.schema_arrow.names if name in checked]
        ids: list[str] = []
        for number in range(file.num_row_groups):
            group = _group(file, path, number, first + len(ids), len(ids))
            self._groups.append(group)
            for batch in _batches(file, group, columns):
                ids += self._check(batch, group._replace(first_in_file=len(ids)), documents)
        # The original's index is the number of a question; questions of different sources may share it.
        if self._original[path] and (len(set(ids)) < len(ids) or not rows.keys().isdisjoint(ids)):
            ids = [default_id(path, index + 1) for index in range(len(ids))]
        for index, sample_id in enumerate(ids):
            here = f"{path}: row {index + 1}"
            if sample_id in rows:
                raise ValueError(f"{here}: id: {sample_id!r} is the id of {rows[sample_id]} too; ids must be unique")
            rows[sample_id] = here
        self.ids += ids

    def _check(self, batch: pa.RecordBatch, place: Group, documents: set[Path]) -> list[str]:
        """Check rows without converting their documents to Python; returns the ids."""
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            end = place.first_in_file + len(batch)
            raise ValueError(f"{place.path}: rows {place.first_in_file + 1} to {end}: {_line(error)}") from None
        given = [True] * len(batch)
        if "context" in batch.schema.names:
            given = batch.column("context").is_valid().to_pylist()
            batch = batch.drop_columns(["context"])
        ids = []
        for offset, (row, has_context) in enumerate(zip(batch.to_pylist(), given, strict=True)):
            index = place.first_in_file + offset
            try:
                row = self._row(place.path, row)
                if has_context and "context" in self._schemas[place.path].names:
                    row["context"] = ""  # arrow has checked that it is a text
                check_row(row, place.path.parent, documents)
                ids.append(row_id(row, default_id(place.path, index + 1)))
            except ValueError as error:
                raise ValueError(f"{place.path}: row {index + 1}: {error}") from None
            self.questions.append(row["question"])
        return ids

    # --- reading --------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_windows", "_stream", "_stream_next")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def _forget(self) -> None:
        self._windows: OrderedDict[int, Window] = OrderedDict()  # by first row; the last one was used last
        self._stream: tuple[Group, Iterator[pa.RecordBatch]] | None = None
        self._stream_next = 0  # index of the stream's next row

    def _read(self, index: int) -> Sample:
        group = self._groups[bisect_right(self._starts, index) - 1]
        window = self._window(index, group)
        number = index - group.first + group.first_in_file + 1
        try:
            row = self._row(group.path, window.table.slice(index - window.first, 1).to_pylist()[0])
            return row_sample(row, self.ids[index], group.path.parent)
        except ValueError as error:
            raise ValueError(f"{group.path}: row {number}: {error}") from None

    def _window(self, index: int, group: Group) -> Window:
        for window in self._windows.values():
            if 0 <= index - window.first < len(window.table):
                self._windows.move_to_end(window.first)
                return window
        check_unchanged(group.path, self._stamps[group.path])
        if self._stream is None or self._stream[0] != group or self._stream_next > index:
            with _readable(group.path):
                file = _parquet_file(group.path)
            self._stream, self._stream_next = (group, _batches(file, group, None)), group.first
        for batch in self._stream[1]:
            window = Window(self._stream_next, batch)
            self._stream_next += len(batch)
            if index < self._stream_next:
                self._windows[window.first] = window
                if len(self._windows) > CACHED_WINDOWS:
                    self._windows.popitem(last=False)
                return window
        raise ValueError(f"{group.path}: row group {group.number + 1} has fewer rows than its header; download or write it again")

    def _row(self, path: Path, row: dict[str, Any]) -> dict[str, Any]:
        """A parquet row as a row of the custom format."""
        schema = self._schemas[path]
        given = {}
        for name, value in row.items():
            if value is None or name.startswith(PANDAS_INDEX):
                continue
            marked = (schema.field(name).metadata or {}).items() >= JSON_COLUMN.items()
            given[name] = json.loads(value) if marked else value
        return _from_original(given) if self._original[path] else given


# --- one file -----------------------------------------------------------------------------------------------


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as parquet: {_line(error)}; download or write it again") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _parquet_file(path: Path) -> pq.ParquetFile:
    return pq.ParquetFile(path, buffer_size=2**20)  # without a buffer, a row group's column is loaded as a whole


def _group(file: pq.ParquetFile, path: Path, number: int, first: int, first_in_file: int) -> Group:
    about = file.metadata.row_group(number)
    row_bytes = about.total_byte_size / max(1, about.num_rows)
    return Group(path, number, first, first_in_file, max(1, int(WINDOW_BYTES / max(1.0, row_bytes))))


def _batches(file: pq.ParquetFile, group: Group, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
    """A row group's rows, `group.window_rows` at a time."""
    with _readable(group.path):
        yield from file.iter_batches(group.window_rows, row_groups=[group.number], columns=columns, use_threads=False)


def _is_original(path: Path, schema: pa.Schema) -> bool:
    """Whether the columns are the original's; raises ValueError if neither schema matches."""
    names = set(schema.names)
    original = {"prompt", "reward_model"} <= names
    if {"supporting_facts", "answer"} <= names:
        raise ValueError(
            f"{path}: holds HotpotQA's questions with ten paragraphs each, not long documents; make those from it with "
            "`memrl data hotpotqa`"
        )
    if not original and not ({"question", "answers"} <= names and names & {"context", "file"}):
        raise ValueError(
            f"{path}: has the columns {', '.join(sorted(names)) or 'nothing'}; needed are {REQUIRED}, or the published "
            f"{', '.join(ORIGINAL_COLUMNS)}"
        )
    if original and "context" not in names:
        raise ValueError(f"{path}: context: there is no such column; the published files hold the document there")
    if "context" in names and not _is_text(schema.field("context").type):
        raise ValueError(f"{path}: context: the column's type is {schema.field('context').type}; allowed is string")
    return original


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _from_original(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the columns of the original's training data as a row of the custom format."""
    prompt, reward, info = (row.pop(name, None) for name in ("prompt", "reward_model", "extra_info"))
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    asked = [message.get("content") for message in messages if isinstance(message, dict) and message.get("role") == "user"]
    if len(asked) != 1 or not isinstance(asked[0], str):
        raise ValueError(f"prompt: got {describe(prompt)}; allowed is one message of the user, the question")
    if not isinstance(reward, dict):
        raise ValueError(f"reward_model: got {describe(reward)}; allowed is a struct with ground_truth, the gold answers")
    answers = list(check_answers(reward.get("ground_truth"), "reward_model.ground_truth"))
    index = info.get("index") if isinstance(info, dict) else None
    fields = {"id": index, "question": asked[0], "answers": answers, "context": row.pop("context", None), "extra_info": info}
    others = {name: value for name, value in row.items() if name not in FIELDS}
    return {**others, **{name: value for name, value in fields.items() if value is not None}}
