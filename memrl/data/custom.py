"""Read and check JSON lines of samples: the user's own documents and questions, one sample per line.

    {"id": "q1", "question": "Who built it?", "context": "The tower ...", "answers": ["Eiffel", "G. Eiffel"]}
    {"question": "When?", "file": "texts/tower.txt", "answers": "1889", "source": "my notes"}

`memrl.data.rows.Row` names the fields. A sample has either `context` or `file`, and other fields become its metadata, under
their own names. A JSON list of such objects is read too, and the original's evaluation files (`memrl.data.original`). The file is
UTF-8; a byte order mark and blank lines are skipped. Every line is checked when the file is opened. Only ids, questions and the
places of the lines are kept, and a line is parsed again when its sample is read, because all documents together may be larger
than memory.
"""

import codecs
import hashlib
import os
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from io import TextIOWrapper
from pathlib import Path
from typing import Any, overload

from memrl.data.corpora.items import listed_values
from memrl.data.json_values import MOST_BYTES
from memrl.data.original import from_evaluation, hotpotqa_paragraphs, is_evaluation
from memrl.data.rows import REQUIRED, TextFiles, check_row, check_unique, parse_row, row_id, row_sample
from memrl.types import Sample
from memrl.utils.bounded_files import open_regular


class Samples(Sequence[Sample]):
    """A data set in files that is checked when it is opened and whose samples are read one at a time.

    Pickling drops open files, so worker processes can share it.

    Attributes:
        paths: the files of the data set, those of single documents included.
        ids, questions: of all samples in order, available without reading the documents.
        text_files: the documents that rows name by `file`.
    """

    def __init__(self, name: str | os.PathLike[str], allow_files: bool):
        self.name = str(name)
        self.paths: list[Path] = []
        self.ids: list[str] = []
        self.questions: list[str] = []
        self.text_files = TextFiles(allow_files)

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.name}")
        index %= len(self)
        row, folder = self._read(index)
        try:
            return row_sample(row, self.ids[index], folder, self.text_files)
        except ValueError as error:  # the file of a document has changed
            raise ValueError(f"{self.name}: sample {self.ids[index]!r}: {error}") from None

    @abstractmethod
    def _read(self, index: int) -> tuple[dict[str, Any], Path]:
        """A checked row, and the folder that its `file` is relative to."""


class JsonlSamples(Samples):
    """The samples of a file of JSON lines, or of a JSON list.

    Args:
        allow_files: `file` may name files outside the folder of the data set.
        hotpotqa: the file whose paragraphs the numbers in the original's longest evaluation files mean.

    Raises:
        ValueError: a mistake in the file; names file, line, field and what is allowed.
    """

    def __init__(self, path: str | os.PathLike[str], allow_files: bool = False, hotpotqa: str | os.PathLike[str] | None = None):
        super().__init__(path, allow_files)
        self.path, self.hotpotqa = Path(path), hotpotqa
        self._offsets, self._lengths = array("Q"), array("Q")
        self._file = UnchangedFile(self.path)
        lines: dict[str, str] = {}
        for where, number, offset, line in self._lines():
            try:
                row = self._parse(line)
                check_row(row, self.path.parent, self.text_files)
                sample_id = row_id(row, self.path, number)
                check_unique(sample_id, f"{where} {number}", lines)
            except ValueError as error:
                raise ValueError(f"{self.path}: {where} {number}: {error}") from None
            self.ids.append(sample_id)
            self.questions.append(row["question"])
            self._offsets.append(offset)
            self._lengths.append(len(line))
        if not self.ids:
            raise ValueError(f"{self.path}: no samples; write one JSON object a line with {REQUIRED}")
        self._file.remember()
        self.paths = [self.path, *sorted(self.text_files.paths)]
        if "_paragraphs" in vars(self) and hotpotqa is not None:
            self.paths.append(Path(hotpotqa))

    def _lines(self) -> Iterator[tuple[str, int, int, bytes]]:
        """("line", number from 1, offset in bytes, line) of each line that is not blank; the same of the items of a JSON list."""
        with open_regular(self.path) as file:
            offset = len(codecs.BOM_UTF8) if file.peek(3).startswith(codecs.BOM_UTF8) else 0
            file.seek(offset)
            while (first := file.read(1)).isspace():
                offset += 1
            if first == b"[":
                try:
                    with TextIOWrapper(file, encoding="utf-8", newline="\n") as text:
                        for number, (_, begin, item) in enumerate(listed_values(self.path, text, offset + 1), start=1):
                            yield "item", number, begin, item.encode()
                except UnicodeDecodeError as error:
                    byte = f"byte 0x{error.object[error.start]:02x}"
                    raise ValueError(f"{self.path}: {byte} in it is not UTF-8; save the file as UTF-8") from None
                return
            file.seek(0)
            offset = number = 0
            while line := file.readline(MOST_BYTES + 1):
                number, begin = number + 1, offset
                offset += len(line)
                if len(line) > MOST_BYTES:
                    raise ValueError(f"{self.path}: line {number}: is longer than {MOST_BYTES >> 20} MiB; a line is one sample")
                if number == 1 and line.startswith(codecs.BOM_UTF8):
                    begin, line = begin + len(codecs.BOM_UTF8), line[len(codecs.BOM_UTF8) :]
                if line.strip():
                    yield "line", number, begin, line

    def _read(self, index: int) -> tuple[dict[str, Any], Path]:
        self._file.check()
        with open(self.path, "rb") as file:
            file.seek(self._offsets[index])
            line = file.read(self._lengths[index])
        return self._parse(line), self.path.parent

    def _parse(self, line: bytes) -> dict[str, Any]:
        row = parse_row(line)
        return from_evaluation(row, self.path, lambda: self._paragraphs) if is_evaluation(row) else row

    @cached_property
    def _paragraphs(self) -> list[str]:
        return hotpotqa_paragraphs(self.hotpotqa)


class UnchangedFile:
    """A file whose content has to stay what it was when the data set was opened.

    Raises:
        ValueError: it cannot be read, or (`check`) has other content now.
    """

    def __init__(self, path: Path):
        self.path = path
        self._stamp, self._digest = self._status(), ""

    def remember(self) -> None:
        """Call it when the data set has been checked: a wrong file of any size is refused long before all of it is read."""
        self._digest = self._hash()
        if self._status() != self._stamp:
            raise self._changed()

    def check(self) -> None:
        """The content is read again only if size or time have changed; a new time alone (`touch`, a copy) is no change."""
        stamp = self._status()
        if stamp == self._stamp:
            return
        if stamp[0] != self._stamp[0] or self._hash() != self._digest:
            raise self._changed()
        self._stamp = stamp

    def _changed(self) -> ValueError:
        advice = "put the old content back, or start anew with the new one"
        return ValueError(f"{self.path}: changed while the run reads it; {advice}")

    def _status(self) -> tuple[int, int]:
        try:
            status = self.path.stat()
        except (OSError, ValueError) as error:  # ValueError: a null character in the name
            raise ValueError(f"{self.path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if not self.path.is_file():
            raise ValueError(f"{self.path}: is not a file; a data set is a .jsonl, .json or .parquet file")
        return status.st_size, status.st_mtime_ns

    def _hash(self) -> str:
        with open_regular(self.path) as file:
            digest = hashlib.blake2b()
            while block := file.read(2**20):
                digest.update(block)
        return digest.hexdigest()
