"""Read and check parquet files of samples, with memrl's own columns or those of MemAgent's published training data.

    own         question string, context or file string, answers list<string> or string; optional id, match;
                other columns are metadata (null: the sample has none of that name)
    original's  prompt list<{role, content}>, context string, reward_model {ground_truth: string or list<string>};
                optional extra_info {index: the id}; other columns are metadata

The fields have the same meaning and the same checks as in JSON lines (`memrl.data.custom`); rows count from 1. Documents are read
in windows of several rows, and the last windows are kept. A row group can only be read from its beginning: reading in order is
fast for any file, reading at random only if row groups are small, as those written by `memrl.data.columns`.
"""

import os
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from memrl.data.columns import column_types, is_text, one_line, open_parquet, readable, row_values
from memrl.data.custom import Samples, UnchangedFile
from memrl.data.json_values import parse_json
from memrl.data.original import from_training
from memrl.data.rows import REQUIRED, check_row, check_unique, row_id

WINDOW_BYTES = 2**25  # of a window; a larger row is a window of its own
CACHED_WINDOWS = 2
ORIGINAL_COLUMNS = ("prompt", "reward_model", "context")


class File(NamedTuple):
    """`types`: by column, the type to which its values are converted; `json`: the columns whose texts are JSON."""

    path: Path
    unchanged: UnchangedFile
    types: dict[str, pa.DataType]
    json: set[str]
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

    def __init__(self, paths: Sequence[str | os.PathLike[str]], allow_files: bool = False):
        paths = [Path(path) for path in paths]
        super().__init__(paths[0] if len(paths) == 1 else paths[0].parent, allow_files)
        self._groups: list[Group] = []
        self._windows: deque[Window] = deque(maxlen=CACHED_WINDOWS)
        self._stream: Iterator[pa.RecordBatch] = iter(())  # the rows of a group after those of the last window
        places: dict[str, str] = {}
        for unchanged in [UnchangedFile(path) for path in paths]:
            self._open(unchanged, places)
            unchanged.remember()
        if not self.ids:
            raise ValueError(f"{self.name}: no samples; a row needs {REQUIRED}")
        self.paths = [*paths, *sorted(self.text_files.paths)]
        self._starts = [group.first for group in self._groups]

    # --- checking -------------------------------------------------------------------------------------------

    def _open(self, unchanged: UnchangedFile, places: dict[str, str]) -> None:
        """Check a file and note its row groups. `places`: id -> file and row, for error messages."""
        path = unchanged.path
        opened = open_parquet(path)
        is_original = _is_original(path, opened.schema_arrow)
        file = File(path, unchanged, *column_types(path, opened.schema_arrow), is_original)
        ids: list[str] = []
        for number in range(opened.num_row_groups):
            about = opened.metadata.row_group(number)
            row_bytes = max(1, about.total_byte_size) / max(1, about.num_rows)
            group = Group(file, number, len(self) + len(ids), max(1, int(WINDOW_BYTES / row_bytes)))
            self._groups.append(group)
            for batch in _batches(opened, group):
                ids += self._check(file, batch, len(ids) + 1)
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

    def _check(self, file: File, batch: pa.RecordBatch, first: int) -> list[str]:
        """Check the rows from number `first` on without converting their documents to Python; returns the ids."""
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{file.path}: rows {first} to {first + len(batch) - 1}: {one_line(error)}") from None
        if "context" in batch.schema.names:  # validated as a text
            place = batch.schema.get_field_index("context")
            texts = ["" if is_given else None for is_given in batch.column(place).is_valid().to_pylist()]
            batch = batch.set_column(place, "context", pa.array(texts, pa.string()))
        ids = []
        for number in range(first, first + len(batch)):
            try:
                row = _row(file, batch, number - first)
                check_row(row, file.path.parent, self.text_files)
            except (ValueError, ArithmeticError) as error:
                raise ValueError(f"{file.path}: row {number}: {error}") from None
            ids.append(row_id(row, file.path, number))
            self.questions.append(sys.intern(row["question"]))  # a dictionary can name one long text a million times
        return ids

    # --- reading --------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_windows": deque(maxlen=CACHED_WINDOWS), "_stream": iter(())}

    def _read(self, index: int) -> tuple[dict[str, Any], Path]:
        group = self._groups[bisect_right(self._starts, index) - 1]
        window = self._window(index, group)
        return _row(group.file, window.rows, index - window.first), group.file.path.parent

    def _window(self, index: int, group: Group) -> Window:
        for window in self._windows:
            if window.first <= index < window.end:
                return window
        path = group.file.path
        group.file.unchanged.check()
        if self._windows and self._windows[-1].group is group and self._windows[-1].end <= index:
            end = self._windows[-1].end
        else:
            self._stream, end = _batches(open_parquet(path), group), group.first
        for batch in self._stream:
            first, end = end, end + len(batch)
            if index < end:
                self._windows.append(Window(group, first, end, batch))
                return self._windows[-1]
        raise ValueError(f"{path}: row group {group.number + 1} has fewer rows than its header; download or write it again")


# --- one file -----------------------------------------------------------------------------------------------


def _batches(file: pq.ParquetFile, group: Group) -> Iterator[pa.RecordBatch]:
    """A row group's rows, `group.window_rows` at a time."""
    with readable(group.file.path):
        yield from file.iter_batches(group.window_rows, row_groups=[group.number], use_threads=False)


def _row(file: File, batch: pa.RecordBatch, place: int) -> dict[str, Any]:
    """A parquet row as a row of the custom format."""
    row = {}
    for name, value in row_values(batch, file.types, place).items():
        if value is not None:
            try:
                row[name] = parse_json(value.encode()) if name in file.json else value
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return from_training(row) if file.is_original else row


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
            f"{path}: has the columns {', '.join(sorted(names))[:300] or 'nothing'}; needed are {REQUIRED}, or the published "
            f"{', '.join(ORIGINAL_COLUMNS)}"
        )
    if original and "context" not in names:
        raise ValueError(f"{path}: context: there is no such column; the published files hold the document there")
    if "context" in names and not is_text(schema.field("context").type):
        raise ValueError(f"{path}: context: the column's type is {schema.field('context').type}; allowed is string")
    return original
