"""Read and check JSON lines of samples: the user's own documents and questions, one sample per line.

    {"id": "q1", "question": "Who built it?", "context": "The tower ...", "answers": ["Eiffel", "G. Eiffel"]}
    {"question": "When?", "file": "texts/tower.txt", "answers": "1889", "source": "my notes"}

`Row` names the fields. A sample has either `context` or `file`, and other fields become its metadata, under their own names.
The file is UTF-8; a byte order mark and blank lines are skipped. Every line is checked when the file is opened. Only ids,
questions and the places of the lines are kept, and a line is parsed again when its sample is read, because all documents together
may be larger than memory.
"""

import codecs
import json
import os
from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, overload

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from memrl.types import Sample


class Samples(Sequence[Sample]):
    """A data set in files that is checked when it is opened and whose samples are read one at a time.

    Pickling drops open files, so worker processes can share it.

    Attributes:
        paths: the files of the data set, those of single documents included.
        ids, questions: of all samples in order, available without reading the documents.
    """

    def __init__(self, name: str | os.PathLike[str]):
        self.name = str(name)
        self.paths: list[Path] = []
        self.ids: list[str] = []
        self.questions: list[str] = []

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
            return row_sample(row, self.ids[index], folder)
        except ValueError as error:  # the file of a document has changed
            raise ValueError(f"{self.name}: sample {self.ids[index]!r}: {error}") from None

    @abstractmethod
    def _read(self, index: int) -> tuple[dict[str, Any], Path]:
        """A checked row, and the folder that its `file` is relative to."""


class JsonlSamples(Samples):
    """The samples of a JSON lines file.

    Raises:
        ValueError: a mistake in the file; names file, line, field and what is allowed.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        self.path = Path(path)
        self._offsets, self._lengths = array("Q"), array("Q")
        self._stamp = file_stamp(self.path)
        lines: dict[str, str] = {}
        documents: set[Path] = set()
        for number, offset, line in self._lines():
            try:
                row = _parse(line)
                check_row(row, self.path.parent, documents)
                sample_id = row_id(row, self.path, number)
                check_unique(sample_id, f"line {number}", lines)
            except ValueError as error:
                raise ValueError(f"{self.path}: line {number}: {error}") from None
            self.ids.append(sample_id)
            self.questions.append(row["question"])
            self._offsets.append(offset)
            self._lengths.append(len(line))
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

    def _read(self, index: int) -> tuple[dict[str, Any], Path]:
        check_unchanged(self.path, self._stamp)
        with open(self.path, "rb") as file:
            file.seek(self._offsets[index])
            line = file.read(self._lengths[index])
        return _parse(line), self.path.parent


# --- files --------------------------------------------------------------------------------------------------


def file_stamp(path: Path) -> tuple[int, int]:
    """Size and time of a file, which change with its content.

    Raises:
        ValueError: no such file.
    """
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


# --- rows: a sample as a dict, from a file of any type ------------------------------------------------------


# str.encode refuses half a surrogate pair, which JSON can hold and no text.
Text = Annotated[str, AfterValidator(str.encode)]
Filled = Annotated[str, Field(pattern=r"\S"), AfterValidator(str.encode)]
Place = Annotated[int, Field(ge=0)] | None  # null in parquet if only other objects have the field


class Evidence(TypedDict, total=False):
    begin: Place
    end: Place


class Row(BaseModel):
    """The fields of a row; "allowed is" and the description make an error message."""

    model_config = ConfigDict(strict=True, regex_engine="python-re")

    # Unique in the file; by default "<file name>:<line>".
    id: Annotated[Filled, BeforeValidator(lambda value: str(value) if type(value) is int else value)] = Field(
        "", description="a text that is not blank, or a whole number"
    )
    question: Filled = Field(description="a text that is not blank")
    answers: Annotated[list[Filled], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)] = Field(
        min_length=1, description="a list of texts that are not blank, at least one, or one such text"
    )
    # "any": each answer alone is right; "all": every answer has to be named.
    match: Literal["any", "all"] = Field("any", description='"any" or "all"')
    context: Text = Field("", description="the document as text")  # may be empty
    file: Filled = Field("", description="the path of a UTF-8 text file")  # relative to the folder of the data set
    # Metadata: where each piece of evidence begins, as a share of the document's characters.
    depths: list[Annotated[float, Field(ge=0, le=1)]] = Field([], description="a list of numbers from 0 to 1")
    evidence: list[Evidence] = Field(
        [], description="a list of objects, whose begin and end are a whole number of characters, at least 0"
    )


FIELDS = ("id", "question", "context", "file", "answers", "match")
PLACES = ("depths", "evidence")  # metadata that memrl itself reads
REQUIRED = '"question", "answers", and "context" or "file"'


def check_row(row: dict[str, Any], folder: Path, documents: set[Path]) -> None:
    """Raise ValueError, which begins with the field, if a field is missing or wrong; the callers prepend file and line.

    Args:
        folder: what `file` is relative to.
        documents: readable files, which are not checked again; the row's file is added.
    """
    try:
        Row.model_validate(row)
    except ValidationError as error:
        raise ValueError(_explain(error.errors()[0])) from None
    if ("context" in row) == ("file" in row):
        got = "both are given" if "file" in row else "is missing"
        raise ValueError(f"context or file: {got}; give the document or the path of its file")
    if "file" in row and folder / row["file"] not in documents:
        _read_document(row["file"], folder)
        documents.add(folder / row["file"])


def _explain(error: Mapping[str, Any]) -> str:
    name = ": ".join(part for part in error["loc"] if isinstance(part, str))
    if error["type"] == "missing":
        return f"{name}: is missing; a sample needs {REQUIRED}"
    try:
        str(error["input"]).encode()
    except UnicodeEncodeError as problem:
        return f"{name}: character {problem.start} is half a surrogate pair, which no text can hold; remove it"
    return f"{name}: got {describe(error['input'])}; allowed is {Row.model_fields[str(error['loc'][0])].description}"


def check_unique(sample_id: str, place: str, places: dict[str, str]) -> None:
    """Raise ValueError for an id that has a place already; note the place of the others."""
    if sample_id in places:
        raise ValueError(f"id: {sample_id!r} is the id of {places[sample_id]} too; ids must be unique")
    places[sample_id] = place


def row_id(row: dict[str, Any], path: Path, number: int) -> str:
    """The id of a checked row; by default its file and line."""
    return str(row.get("id", f"{path.name}:{number}"))


def row_sample(row: dict[str, Any], sample_id: str, folder: Path) -> Sample:
    """The sample of a checked row."""
    answers = row["answers"]
    return Sample(
        id=sample_id,
        question=row["question"],
        context=row["context"] if "context" in row else _read_document(row["file"], folder),
        answers=(answers,) if isinstance(answers, str) else tuple(answers),
        match=row.get("match", "any"),
        metadata={key: value for key, value in row.items() if key not in FIELDS},
    )


def _read_document(name: str, folder: Path) -> str:
    document = folder / name
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
    # json.loads keeps the last of equal keys without a warning, which would turn a typing error into wrong data.
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return row


def describe(value: Any) -> str:
    """A value for an error message: its type, and its first 60 characters."""
    names = {dict: "an object", list: "a list", str: "the text", bool: "the truth value", type(None): "null"}
    text = json.dumps(value, default=str)
    shown = text if len(text) <= 60 else text[:57] + "..."
    return "null" if value is None else f"{names.get(type(value), 'the number')} {shown}"
