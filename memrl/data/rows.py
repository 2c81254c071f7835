"""A sample as a row, a dict from a file of any type: its fields, the checks on them, and the text files that rows name.

Files come from elsewhere, so every value has bounds, and whatever a row holds is plain JSON: results and reward functions get it.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError
from typing_extensions import TypedDict

from memrl.data.json_values import MOST_BYTES, describe, parse_json, shown
from memrl.types import Sample
from memrl.utils.bounded_files import read_bounded

DEPTH = 50  # of lists and objects in each other; published data sets have at most 5
QUESTION_CHARACTERS, ID_CHARACTERS = 10**6, 1000  # agent.question_tokens is 1,024 by default

# --- the fields ---------------------------------------------------------------------------------------------

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
        "",
        max_length=ID_CHARACTERS,
        description=f"a text of 1 to {ID_CHARACTERS} characters that is not blank, or a whole number",
    )
    question: Filled = Field(
        max_length=QUESTION_CHARACTERS, description=f"a text that is not blank, of at most {QUESTION_CHARACTERS} characters"
    )
    answers: Annotated[list[Filled], FailFast(), BeforeValidator(lambda value: [value] if isinstance(value, str) else value)] = (
        Field(min_length=1, description="a list of texts that are not blank, at least one, or one such text")
    )
    # "any": each answer alone is right; "all": every answer has to be named.
    match: Literal["any", "all"] = Field("any", description='"any" or "all"')
    context: Text = Field("", description="the document as text")  # may be empty
    file: Filled = Field("", description="the path of a UTF-8 text file")  # relative to the folder of the data set
    # Metadata: where each piece of evidence begins, as a share of the document's characters.
    depths: Annotated[list[Annotated[float, Field(ge=0, le=1)]], FailFast()] = Field(
        [], description="a list of numbers from 0 to 1"
    )
    evidence: Annotated[list[Evidence], FailFast()] = Field(
        [], description="a list of objects, whose begin and end are a whole number of characters, at least 0"
    )


FIELDS = ("id", "question", "context", "file", "answers", "match")
REQUIRED = '"question", "answers", and "context" or "file"'


# --- text files ---------------------------------------------------------------------------------------------


@dataclass
class TextFiles:
    """The documents that rows name by `file`.

    A data set from elsewhere could name /etc/passwd and so send it to an endpoint. Therefore only files below the data set's
    folder are read, after links are followed, unless `allow_outside` is set.

    Attributes:
        paths: those that were checked, under the names that the rows give.
    """

    allow_outside: bool = False
    paths: set[Path] = field(default_factory=set)

    def check(self, name: str, folder: Path) -> None:
        """Raise ValueError, which begins with the field, if the file cannot be read."""
        if folder / name not in self.paths:
            self.read(name, folder)
            self.paths.add(folder / name)

    def read(self, name: str, folder: Path) -> str:
        document = folder / name
        try:
            target = Path(os.path.realpath(document, strict=True))
            is_outside = not self.allow_outside and not target.is_relative_to(os.path.realpath(folder))
            text = "" if is_outside else read_bounded(target, MOST_BYTES).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            problem = f"{document} is not UTF-8 text (byte {error.start}); convert it to UTF-8 text"
            raise ValueError(f"file: {problem}") from None
        except (OSError, ValueError) as error:  # ValueError: a null character in the name, a pipe, a device, too many bytes
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"file: {document} cannot be read: {reason}; the path is relative to {folder}") from None
        if is_outside:
            advice = "move it there, or allow files anywhere by --allow_files (train.py: --data.allow_files true)"
            raise ValueError(f"file: {document} lies outside the data set's folder {folder}; {advice}")
        return text.replace("\r\n", "\n").replace("\r", "\n")


# --- rows ---------------------------------------------------------------------------------------------------


def check_row(row: dict[str, Any], folder: Path, files: TextFiles | None = None) -> None:
    """Raise ValueError, which begins with the field, if a field is missing or wrong; the callers prepend file and line.

    Args:
        folder: what `file` is relative to.
    """
    try:
        Row.model_validate(row)
    except ValidationError as error:
        raise ValueError(_explain(error.errors()[0])) from None
    if ("context" in row) == ("file" in row):
        got = "both are given" if "file" in row else "is missing"
        raise ValueError(f"context or file: {got}; give the document or the path of its file")
    for name, value in row.items():
        if name not in FIELDS:
            _check_plain(name, {name: value})
    if "file" in row:
        (files or TextFiles()).check(row["file"], folder)


def _check_plain(name: str, value: Any, depth: int = 0) -> None:
    """Raise ValueError unless the value of the field `name` is JSON that every reader takes."""
    if depth > DEPTH:
        raise ValueError(f"{shown(name)}: has lists and objects in each other, more than {DEPTH} deep; make it flatter")
    match value:
        case str():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ValueError(_surrogate(shown(name), error)) from None
        case float() if not math.isfinite(value):
            raise ValueError(f"{shown(name)}: {value} is no number of JSON; use null, or a text")
        case list():
            for entry in value:
                _check_plain(name, entry, depth + 1)
        case dict():
            for key, entry in value.items():
                _check_plain(name, key, depth + 1)
                _check_plain(name, entry, depth + 1)


def _surrogate(name: str, error: UnicodeEncodeError) -> str:
    return f"{name}: character {error.start} is half a surrogate pair, which no text can hold; remove it"


def _explain(error: Mapping[str, Any]) -> str:
    name = ": ".join(part for part in error["loc"] if isinstance(part, str))
    if error["type"] == "missing":
        return f"{name}: is missing; a sample needs {REQUIRED}"
    try:
        (error["input"] if isinstance(error["input"], str) else "").encode()
    except UnicodeEncodeError as problem:
        return _surrogate(name, problem)
    return f"{name}: got {describe(error['input'])}; allowed is {Row.model_fields[str(error['loc'][0])].description}"


def check_unique(sample_id: str, place: str, places: dict[str, str]) -> None:
    """Raise ValueError for an id that has a place already; note the place of the others."""
    if sample_id in places:
        raise ValueError(f"id: {sample_id!r} is the id of {places[sample_id]} too; ids must be unique")
    places[sample_id] = place


def row_id(row: dict[str, Any], path: Path, number: int) -> str:
    """The id of a checked row; by default its file and line."""
    return str(row.get("id", f"{path.name}:{number}"))


def row_sample(row: dict[str, Any], sample_id: str, folder: Path, files: TextFiles) -> Sample:
    """The sample of a checked row."""
    answers = row["answers"]
    return Sample(
        id=sample_id,
        question=row["question"],
        context=row["context"] if "context" in row else files.read(row["file"], folder),
        answers=(answers,) if isinstance(answers, str) else tuple(answers),
        match=row.get("match", "any"),
        metadata={key: value for key, value in row.items() if key not in FIELDS},
    )


def parse_row(line: bytes) -> dict[str, Any]:
    """A row from its JSON."""
    try:
        row = parse_json(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a JSON object on one line: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is needed on each line, got {describe(row)}")
    return row
