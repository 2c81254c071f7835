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
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from memrl.data.columns import JSON_COLUMN
from memrl.data.custom import (
    FIELDS,
    PLACES,
    REQUIRED,
    Samples,
    check_row,
    check_unchanged,
    check_unique,
    describe,
    file_stamp,
    row_id,
)

WINDOW_BYTES = 2**25  # of a window; a larger row is a window of its own
CACHED_WINDOWS = 2
PANDAS_INDEX = "__index_level_"
ORIGINAL_COLUMNS = ("prompt", "reward_model", "context")


class File(NamedTuple):
    path: Path
    stamp: tuple[int, int]
    schema: pa.Schema
    is_original: bool


class Group(NamedTuple):
    """One row group; `first` is the index of its first row among all samples."""

    file: File
    number: int
    first: int
    window_rows: int


class Window(NamedTuple):
    """Rows of a group that were read together; `first` and `end` are indices among all samples."""

    group: Group
    first: int
    end: int
    rows: pa.RecordBatch


class ParquetSamples(Samples):
    """The samples of one or several parquet files with the same columns, in order."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]]):
        paths = [Path(path) for path in paths]
        super().__init__(paths[0] if len(paths) == 1 else paths[0].parent)
        self._groups: list[Group] = []
        self._windows: deque[Window] = deque(maxlen=CACHED_WINDOWS)
        self._stream: Iterator[pa.RecordBatch] = iter(())  # the rows of a group after those of the last window
        documents: set[Path] = set()
        places: dict[str, str] = {}
        for path, stamp in [(path, file_stamp(path)) for path in paths]:
            self._open(path, stamp, documents, places)
        if not self.ids:
            raise ValueError(f"{self.name}: no samples; a row needs {REQUIRED}")
        self.paths = [*paths, *sorted(documents)]
        self._starts = [group.first for group in self._groups]

    # --- checking -------------------------------------------------------------------------------------------

    def _open(self, path: Path, stamp: tuple[int, int], documents: set[Path], places: dict[str, str]) -> None:
        """Check a file and note its row groups. `places`: id -> file and row, for error messages."""
        opened = _parquet_file(path)
        file = File(path, stamp, opened.schema_arrow, _is_original(path, opened.schema_arrow))
        checked = (*ORIGINAL_COLUMNS, "extra_info", *PLACES) if file.is_original else (*FIELDS, *PLACES)
        columns = [name for name in file.schema.names if name in checked]
        ids: list[str] = []
        for number in range(opened.num_row_groups):
            about = opened.metadata.row_group(number)
            row_bytes = max(1, about.total_byte_size) / max(1, about.num_rows)
            group = Group(file, number, len(self) + len(ids), max(1, int(WINDOW_BYTES / row_bytes)))
            self._groups.append(group)
            for batch in _batches(opened, group, columns):
                ids += self._check(file, batch, len(ids) + 1, documents)
        # The original's index is the number of a question; questions of different sources may share it.
        if file.is_original and (len(set(ids)) < len(ids) or not places.keys().isdisjoint(ids)):
            ids = [row_id({}, path, number) for number in range(1, len(ids) + 1)]
        for number, sample_id in enumerate(ids, start=1):
            place = f"{path}: row {number}"
            try:
                check_unique(sample_id, place, places)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
        self.ids += ids

    def _check(self, file: File, batch: pa.RecordBatch, first: int, documents: set[Path]) -> list[str]:
        """Check the rows from number `first` on without converting their documents to Python; returns the ids."""
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{file.path}: rows {first} to {first + len(batch) - 1}: {_line(error)}") from None
        if "context" in batch.schema.names:  # validated as a text
            place = batch.schema.get_field_index("context")
            texts = ["" if is_given else None for is_given in batch.column(place).is_valid().to_pylist()]
            batch = batch.set_column(place, "context", pa.array(texts, pa.string()))
        ids = []
        for number, fields in enumerate(batch.to_pylist(), start=first):
            try:
                row = _row(file, fields)
                check_row(row, file.path.parent, documents)
            except ValueError as error:
                raise ValueError(f"{file.path}: row {number}: {error}") from None
            ids.append(row_id(row, file.path, number))
            self.questions.append(row["question"])
        return ids

    # --- reading --------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_windows": deque(maxlen=CACHED_WINDOWS), "_stream": iter(())}

    def _read(self, index: int) -> tuple[dict[str, Any], Path]:
        group = self._groups[bisect_right(self._starts, index) - 1]
        window = self._window(index, group)
        return _row(group.file, window.rows.slice(index - window.first, 1).to_pylist()[0]), group.file.path.parent

    def _window(self, index: int, group: Group) -> Window:
        for window in self._windows:
            if window.first <= index < window.end:
                return window
        path = group.file.path
        check_unchanged(path, group.file.stamp)
        if self._windows and self._windows[-1].group is group and self._windows[-1].end <= index:
            end = self._windows[-1].end
        else:
            self._stream, end = _batches(_parquet_file(path), group, None), group.first
        for batch in self._stream:
            first, end = end, end + len(batch)
            if index < end:
                self._windows.append(Window(group, first, end, batch))
                return self._windows[-1]
        raise ValueError(f"{path}: row group {group.number + 1} has fewer rows than its header; download or write it again")


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
    with _readable(path):
        return pq.ParquetFile(path, buffer_size=2**20)  # without a buffer, a row group's column is loaded as a whole


def _batches(file: pq.ParquetFile, group: Group, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
    """A row group's rows, `group.window_rows` at a time."""
    with _readable(group.file.path):
        yield from file.iter_batches(group.window_rows, row_groups=[group.number], columns=columns, use_threads=False)


def _row(file: File, fields: dict[str, Any]) -> dict[str, Any]:
    """A parquet row as a row of the custom format."""
    row = {}
    for name, value in fields.items():
        if value is not None and not name.startswith(PANDAS_INDEX):
            marked = (file.schema.field(name).metadata or {}).items() >= JSON_COLUMN.items()
            row[name] = json.loads(value) if marked else value
    return _from_original(row) if file.is_original else row


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
    if "context" in names:
        kind = schema.field("context").type
        value = kind.value_type if pa.types.is_dictionary(kind) else kind
        if value not in (pa.string(), pa.large_string(), pa.string_view()):
            raise ValueError(f"{path}: context: the column's type is {kind}; allowed is string")
    return original


def _from_original(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the columns of the original's training data as a row of the custom format."""
    prompt, reward, info = (row.pop(name, None) for name in ("prompt", "reward_model", "extra_info"))
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    asked = [message.get("content") for message in messages if isinstance(message, dict) and message.get("role") == "user"]
    if len(asked) != 1 or not isinstance(asked[0], str):
        raise ValueError(f"prompt: got {describe(prompt)}; allowed is one message of the user, the question")
    answers = reward.get("ground_truth") if isinstance(reward, dict) else None
    if not isinstance(answers, str | list):
        raise ValueError(
            f"reward_model.ground_truth: got {describe(answers)}; allowed is a text or a list of texts, the gold answers"
        )
    index = info.get("index") if isinstance(info, dict) else None
    fields = {"id": index, "question": asked[0], "answers": answers, "context": row.pop("context", None), "extra_info": info}
    others = {name: value for name, value in row.items() if name not in FIELDS}
    return {**others, **{name: value for name, value in fields.items() if value is not None}}
