"""The custom data format, JSON lines: one sample a line, anybody's documents and questions.

    {"id": "q1", "question": "Who built it?", "context": "The tower ...", "answers": ["Eiffel", "G. Eiffel"]}
    {"question": "When?", "file": "texts/tower.txt", "answers": "1889", "source": "my notes"}

    question   text, not blank
    context    the document, text; may be empty            } one of the two
    file       path of a UTF-8 text file that holds it,    }
               relative to the folder of the JSON lines file
    answers    a list of texts, or one text; none of them blank
    match      optional: "any", each answer alone is right (without the field), or "all", every answer has to be named
    id         optional: text or a whole number, unique in the file; else "<file name>:<line>"
    depths     optional metadata: numbers from 0 to 1, where each piece of evidence begins as a share of the document's characters
    evidence   optional metadata: objects, whose `begin` and `end` are places in characters
    others     anything; they become the sample's metadata, under their own names

The file is UTF-8; a byte order mark and blank lines are skipped. Every line is checked when the file is
opened; then only ids, questions and the lines' places are kept and a line is parsed again when its sample is asked for, because
all the documents together may be larger than memory.
"""

import codecs
import json
import os
from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memrl.types import Sample

FIELDS = ("id", "question", "context", "file", "answers", "match")


class Samples(Sequence[Sample]):
    """A data set in files, checked when it is opened, whose samples are read when asked for.

    It holds no open file across pickling, so worker processes can share it.

    Attributes:
        paths: the files that hold it, those of single documents included.
        ids: of all samples, in order.
        questions: of all samples, in order; so nobody has to read the documents for them.
    """

    def __init__(self, name: str | os.PathLike[str]):
        self.name = str(name)
        self.paths: list[Path] = []
        self.ids: list[str] = []
        self.questions: list[str] = []

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index):
        """The sample at `index`, counted from the end where negative; a list of samples for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.name}")
        return self._read(index % len(self))

    @abstractmethod
    def _read(self, index: int) -> Sample: ...


def load_jsonl(path: str | os.PathLike[str]) -> "JsonlSamples":
    """Open and check a JSON lines file; a ValueError names file, line, field and what is allowed."""
    return JsonlSamples(path)


class JsonlSamples(Samples):
    """The samples of a JSON lines file."""

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        self.path = Path(path)
        self._offsets, self._lengths, self._numbers = array("Q"), array("Q"), array("Q")
        self._stamp = file_stamp(self.path)
        lines_of_ids: dict[str, int] = {}
        documents: set[Path] = set()
        for number, offset, line in self._lines():
            try:
                row = _parse(line)
                sample_id = row_id(row, self._default_id(number))
                if sample_id in lines_of_ids:
                    raise ValueError(f"id: {sample_id!r} is the id of line {lines_of_ids[sample_id]} too; ids must be unique")
                check_row(row, self.path.parent, documents)
            except ValueError as error:
                raise self._error(number, error) from None
            lines_of_ids[sample_id] = number
            self.ids.append(sample_id)
            self.questions.append(row["question"])
            self._offsets.append(offset)
            self._lengths.append(len(line))
            self._numbers.append(number)
        if not self.ids:
            raise ValueError(f"{self.path}: no samples; write one JSON object a line with {REQUIRED}")
        self.paths = [self.path, *sorted(documents)]

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

    def _read(self, index: int) -> Sample:
        check_unchanged(self.path, self._stamp)
        with open(self.path, "rb") as file:
            file.seek(self._offsets[index])
            line = file.read(self._lengths[index])
        try:
            return row_sample(_parse(line), self.ids[index], self.path.parent)
        except ValueError as error:
            raise self._error(self._numbers[index], error) from None

    def _default_id(self, number: int) -> str:
        return f"{self.path.name}:{number}"

    def _error(self, number: int, problem: ValueError) -> ValueError:
        return ValueError(f"{self.path}: line {number}: {problem}")


# --- files --------------------------------------------------------------------------------------------------


def file_stamp(path: Path) -> tuple[int, int]:
    """Size and time of a file, which tell whether somebody has changed it; ValueError where it is none."""
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    if not path.is_file():
        raise ValueError(f"{path}: is not a file; a data set is a .jsonl or .parquet file")
    return status.st_size, status.st_mtime_ns


def check_unchanged(path: Path, stamp: tuple[int, int]) -> None:
    if file_stamp(path) != stamp:
        raise ValueError(f"{path}: changed since it was opened; open it again")


# --- rows: a sample as a dict of the fields above, whatever file it stands in -------------------------------
# Their errors begin with the field; who knows file and line puts them before it.


def check_row(row: dict[str, Any], folder: Path, documents: set[Path]) -> None:
    """Raise ValueError where a field other than the id is missing or wrong.

    Args:
        folder: what `file` is relative to.
        documents: files that are known to be good; those of this row join them.
    """
    for field in ("question", "answers"):
        if field not in row:
            raise ValueError(f"{field}: is missing; a sample needs {REQUIRED}")
    _check_text(row["question"], "question", "a text that is not blank")
    check_answers(row["answers"])
    _match(row)
    if ("context" in row) == ("file" in row):
        got = "both are given" if "file" in row else "is missing"
        raise ValueError(f"context or file: {got}; give the document or the path of its file")
    if "context" in row:
        _check_text(row["context"], "context", "the document as text", blank_too=True)
    elif (document := _document_path(row, folder)) not in documents:
        _read_document(document, folder)
        documents.add(document)
    check_places(row)


def row_sample(row: dict[str, Any], sample_id: str, folder: Path) -> Sample:
    """The sample of a checked row; its places are checked here, where rows are read that were opened without them."""
    check_places(row)
    return Sample(
        id=sample_id,
        question=row["question"],
        context=row["context"] if "context" in row else _read_document(_document_path(row, folder), folder),
        answers=check_answers(row["answers"]),
        match=_match(row),
        metadata={key: value for key, value in row.items() if key not in FIELDS},
    )


def check_places(row: dict[str, Any]) -> None:
    """Raise ValueError where `depths` or `evidence`, the metadata that memrl itself reads, is there and wrong."""
    depths = row.get("depths", [])
    if not isinstance(depths, list | tuple) or not all(_is_number(depth) and 0 <= depth <= 1 for depth in depths):
        raise ValueError(f"depths: got {describe(depths)}; allowed is a list of numbers from 0 to 1")
    evidence = row.get("evidence", [])
    if not isinstance(evidence, list | tuple) or not all(isinstance(piece, dict) for piece in evidence):
        raise ValueError(f"evidence: got {describe(evidence)}; allowed is a list of objects")
    for piece in evidence:
        for end in ("begin", "end"):
            place = piece.get(end)  # parquet has null where an object lacks a field that another has
            if place is not None and (not isinstance(place, int) or isinstance(place, bool) or place < 0):
                raise ValueError(f"evidence: {end}: got {describe(place)}; allowed is a whole number of characters, at least 0")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def row_id(row: dict[str, Any], default: str) -> str:
    value = row.get("id", default)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _check_text(value, "id", "a text that is not blank, or a whole number")


def _check_text(value: Any, field: str, allowed: str, blank_too: bool = False) -> str:
    if not isinstance(value, str) or not (blank_too or value.strip()):
        raise ValueError(f"{field}: got {describe(value)}; allowed is {allowed}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        problem = f"character {error.start} is half a surrogate pair, which no text can hold; remove it"
        raise ValueError(f"{field}: {problem}") from None
    return value


def check_answers(value: Any, field: str = "answers") -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    allowed = "a list of texts that are not blank, at least one, or one such text"
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{field}: got {describe(value)}; allowed is {allowed}")
    return tuple(_check_text(answer, field, allowed) for answer in listed)


def _match(row: dict[str, Any]) -> str:
    value = row.get("match", "any")
    if value not in ("any", "all"):
        raise ValueError(f'match: got {describe(value)}; allowed is "any" or "all"')
    return value


def _document_path(row: dict[str, Any], folder: Path) -> Path:
    return folder / _check_text(row["file"], "file", "the path of a UTF-8 text file")


def _read_document(document: Path, folder: Path) -> str:
    try:
        return document.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"{document} is not UTF-8 text (byte {error.start}); convert it to UTF-8 text"
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = getattr(error, "strerror", None) or error
        problem = f"{document} cannot be read: {reason}; the path is relative to {folder}"
    raise ValueError(f"file: {problem}")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        problem = f"byte 0x{line[error.start]:02x} at {error.start} is not UTF-8; save the file as UTF-8"
        raise ValueError(problem) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON object on one line: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is needed on each line, got {describe(row)}")
    return row


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Python keeps the last of equal keys in silence, which turns a slip of the pen into wrong data.
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return row


REQUIRED = '"question", "answers", and "context" or "file"'


def describe(value: Any) -> str:
    """A value for an error message: what it is, and as much of it as fits a line."""
    names = {dict: "an object", list: "a list", str: "the text", bool: "the truth value", type(None): "null"}
    text = json.dumps(value, default=str)
    shown = text if len(text) <= 60 else text[:57] + "..."
    return "null" if value is None else f"{names.get(type(value), 'the number')} {shown}"
