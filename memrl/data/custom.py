"""The custom data format, JSON lines: one sample a line, anybody's documents and questions.

    {"id": "q1", "question": "Who built it?", "context": "The tower ...", "answers": ["Eiffel", "G. Eiffel"]}
    {"question": "When?", "file": "texts/tower.txt", "answers": "1889", "source": "my notes"}

    question   text, not blank
    context    the document, text; may be empty            } one of the two
    file       path of a UTF-8 text file that holds it,    }
               relative to the folder of the JSON lines file
    answers    a list of texts, each of which alone is right, or one text; none of them blank
    id         optional: text or a whole number, unique in the file; else "<file name>:<line>"
    others     anything; they become the sample's metadata, under their own names

The file is UTF-8; a byte order mark and blank lines are skipped. Every line is checked when the file is
opened; then only the lines' places are kept and a line is parsed again when its sample is asked for, because
all the documents together may be larger than memory.
"""

import codecs
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memrl.types import Sample

FIELDS = ("id", "question", "context", "file", "answers")


def load_jsonl(path: str | os.PathLike[str]) -> "JsonlSamples":
    """Open and check a JSON lines file; a ValueError names file, line, field and what is allowed."""
    return JsonlSamples(path)


class JsonlSamples(Sequence[Sample]):
    """The samples of a JSON lines file, parsed when asked for.

    It holds no open file, so worker processes can share it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._offsets, self._lengths, self._numbers = array("Q"), array("Q"), array("Q")
        self._stamp = self._current_stamp()
        lines_of_ids: dict[str, int] = {}
        checked_files: set[Path] = set()
        for number, offset, line in self._lines():
            row = self._parse(line, number)
            sample_id = self._id(row, number)
            if sample_id in lines_of_ids:
                problem = f"{sample_id!r} is the id of line {lines_of_ids[sample_id]} too; ids must be unique"
                raise self._error(number, "id", problem)
            lines_of_ids[sample_id] = number
            self._check(row, number, checked_files)
            self._offsets.append(offset)
            self._lengths.append(len(line))
            self._numbers.append(number)
        if not self._offsets:
            raise ValueError(f"{self.path}: no samples; write one JSON object a line with {_required()}")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index):
        """The sample at `index`, counted from the end where negative; a list of samples for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.path}")
        if self._current_stamp() != self._stamp:
            raise ValueError(f"{self.path}: changed since it was opened; open it again")
        with open(self.path, "rb") as file:
            file.seek(self._offsets[index])
            line = file.read(self._lengths[index])
        return self._sample(line, self._numbers[index])

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(line number from 1, offset in bytes, line) of each line that is not blank."""
        offset = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                begin = offset
                offset += len(line)
                if number == 1 and line.startswith(codecs.BOM_UTF8):
                    begin, line = begin + len(codecs.BOM_UTF8), line[len(codecs.BOM_UTF8) :]
                if line.strip():
                    yield number, begin, line

    def _current_stamp(self) -> tuple[int, int]:
        try:
            status = self.path.stat()
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be read: {error.strerror}") from None
        if not self.path.is_file():
            raise ValueError(f"{self.path}: is not a file; a JSON lines file is needed")
        return status.st_size, status.st_mtime_ns

    def _error(self, number: int, field: str, problem: str) -> ValueError:
        return ValueError(f"{self.path}: line {number}: {field}: {problem}")

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line.decode("utf-8"), object_pairs_hook=_without_duplicates)
        except UnicodeDecodeError as error:
            problem = f"byte 0x{line[error.start]:02x} at {error.start} is not UTF-8; save the file as UTF-8"
            raise ValueError(f"{self.path}: line {number}: {problem}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path}: line {number}: not a JSON object on one line: {error}") from None
        if not isinstance(row, dict):
            problem = f"a JSON object is needed on each line, got {_describe(row)}"
            raise ValueError(f"{self.path}: line {number}: {problem}")
        return row

    def _id(self, row: dict[str, Any], number: int) -> str:
        value = row.get("id", f"{self.path.name}:{number}")
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return self._text(value, number, "id", "a text that is not blank, or a whole number")

    def _text(self, value: Any, number: int, field: str, allowed: str, blank_too=False) -> str:
        if not isinstance(value, str) or not (blank_too or value.strip()):
            raise self._error(number, field, f"got {_describe(value)}; allowed is {allowed}")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            problem = f"character {error.start} is half a surrogate pair, which no text can hold; remove it"
            raise self._error(number, field, problem) from None
        return value

    def _answers(self, row: dict[str, Any], number: int) -> tuple[str, ...]:
        value = row["answers"]
        listed = [value] if isinstance(value, str) else value
        allowed = "a list of texts that are not blank, at least one, or one such text"
        if not isinstance(listed, list) or not listed:
            raise self._error(number, "answers", f"got {_describe(value)}; allowed is {allowed}")
        return tuple(self._text(answer, number, "answers", allowed) for answer in listed)

    def _check(self, row: dict[str, Any], number: int, checked_files: set[Path]) -> None:
        """Check a line but for its id. `checked_files` holds the documents known to be good, and grows."""
        for field in ("question", "answers"):
            if field not in row:
                raise self._error(number, field, f"is missing; a line needs {_required()}")
        self._text(row["question"], number, "question", "a text that is not blank")
        self._answers(row, number)
        if ("context" in row) == ("file" in row):
            got = "both are given" if "file" in row else "is missing"
            raise self._error(number, "context or file", f"{got}; give the document or the path of its file")
        if "context" in row:
            self._text(row["context"], number, "context", "the document as text", blank_too=True)
            return
        document = self._document_path(row, number)
        if document not in checked_files:
            self._read(document, number)
            checked_files.add(document)

    def _document_path(self, row: dict[str, Any], number: int) -> Path:
        name = self._text(row["file"], number, "file", "the path of a UTF-8 text file")
        return self.path.parent / name

    def _read(self, document: Path, number: int) -> str:
        try:
            return document.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            problem = f"{document} is not UTF-8 text (byte {error.start}); convert it to UTF-8 text"
        except (OSError, ValueError) as error:  # ValueError: a null character in the name
            reason = getattr(error, "strerror", None) or error
            problem = f"{document} cannot be read: {reason}; the path is relative to {self.path.parent}"
        raise self._error(number, "file", problem)

    def _sample(self, line: bytes, number: int) -> Sample:
        row = self._parse(line, number)
        context = row["context"] if "context" in row else self._read(self._document_path(row, number), number)
        return Sample(
            id=self._id(row, number),
            question=row["question"],
            context=context,
            answers=self._answers(row, number),
            metadata={key: value for key, value in row.items() if key not in FIELDS},
        )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Python keeps the last of equal keys in silence, which turns a slip of the pen into wrong data.
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return row


def _required() -> str:
    return '"question", "answers", and "context" or "file"'


def _describe(value: Any) -> str:
    """A value for an error message: what it is, and as much of it as fits a line."""
    names = {dict: "an object", list: "a list", str: "the text", bool: "the truth value", type(None): "null"}
    text = json.dumps(value)
    shown = text if len(text) <= 60 else text[:57] + "..."
    return "null" if value is None else f"{names.get(type(value), 'the number')} {shown}"
