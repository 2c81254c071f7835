"""Check a row of samples.jsonl: what `memrl eval` writes, and nothing that a summary or a report cannot work with."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memrl.utils.plain_text import printable

_Count = Annotated[int, Field(ge=0, lt=2**53)]  # exact as a float
_Share = Annotated[float, Field(ge=0, le=1)]
_Measured = Annotated[float, Field(ge=0, lt=1e15)] | None


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str
    method: str
    task: str
    length: Annotated[int, Field(ge=1, lt=2**53)] | str
    index: _Count
    repeat: _Count
    id: str
    question: str
    answers: list[str]
    answer: str
    strict: _Share
    lenient: _Share
    exact: _Share
    f1: _Share
    ruler: _Share
    chunks: _Count
    tokens: _Count
    prompt_tokens: _Count
    response_tokens: _Count
    chunk_tokens: _Count
    seconds: _Measured
    peak_gib: _Measured
    depths: list[_Share]
    held: Annotated[str, Field(pattern=r"^[0-9]*$")]
    error: str | None
    turns: dict[str, _Count] = {}  # not in rows of earlier versions
    numbers: dict[str, float] = {}


def check_row(row: dict[str, Any]) -> dict[str, Any]:
    """The row's columns that are read again, without responses and memories.

    Raises:
        ValueError: a column is missing or wrong; the rest of a sentence that begins with file and line.
    """
    try:
        return dict(_Row.model_validate(row))
    except ValidationError as problem:
        error = problem.errors(include_url=False, include_context=False)[0]
    name = str(error["loc"][0])
    if error["type"] == "missing":
        raise ValueError(f"has no {name!r}: rows of an earlier format; run `memrl eval` again into another --out")
    raise ValueError(f"{name} is {printable(repr(row[name])[:300], 60)}; `memrl eval` does not write that")
