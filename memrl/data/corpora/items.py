"""The items of a file, JSON, JSON lines or parquet, one at a time, and the checks of their fields."""

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Any, TextIO

_BLOCK = 2**20  # characters of a JSON list that are read at a time
_ROWS = 256  # of a parquet file at a time
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class Item:
    """An object in a file.

    Attributes:
        where: file and item, as messages name them.
        is_article: it is an entry of the `data` of SQuAD's layout.
    """

    where: str
    fields: dict[str, Any]
    is_article: bool = False

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.where}: {problem}")

    def wrong(self, field: str, allowed: str, got: Any) -> ValueError:
        return self.error(f"{field}: {allowed} is needed, got {repr(got)[:40]}")

    def named(self, name: str) -> "Item":
        return Item(f"{self.where} ({name})", self.fields, self.is_article)

    def text(self, field: str) -> str:
        """A field that has to hold text that is not blank."""
        value = self.fields.get(field)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(field, "a text that is not blank", value)
        return self.checked(field, value)

    def checked(self, field: str, value: str) -> str:
        """The value, if a file can hold it."""
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.error(f"{field}: character {error.start} is half a surrogate pair, which no text can hold") from None
        return value

    def objects(self, field: str, name: str, parent: str = "") -> list["Item"]:
        """A field that has to hold a list of objects, at least one; `name` is what messages call one of them."""
        value = self.fields.get(field)
        if not isinstance(value, list) or not value:
            raise self.wrong(field, "a list of objects, at least one,", value)
        return [_item(f"{self.where}{parent or ', '}{name} {number}", entry) for number, entry in enumerate(value)]


def read_items(path: str | os.PathLike[str]) -> Iterator[Item]:
    """The objects of a JSON list, of JSON lines, of a parquet file, or of the list `data` in a JSON object; at least one.

    Each is read when it is asked for, so that a list, lines or rows take the memory of what is kept of them; an object with
    `data` is parsed as a whole.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    with _opened(path) as file:
        if file is None:
            return (yield from _rows(path))
        while (first := file.read(1)).isspace():
            pass
        if first == "[":
            yield from _listed(path, file)
            return
        file.seek(0)
        if first != "{":
            raise _no_list(path, _parse(path, file.read()))
        yield from _lines_or_articles(path, file)


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[TextIO | None]:
    """The file's text, unpacked; None where it is parquet. What goes wrong when it is read becomes a ValueError."""
    try:
        with open(path, "rb") as file:
            start = file.peek(4)
            if start.startswith(b"PAR1"):
                yield None
                return
            unpacked = gzip.GzipFile(fileobj=file) if start.startswith(b"\x1f\x8b") else file
            # Lines by "\n" alone: a JSON text may hold the other line separators.
            with TextIOWrapper(unpacked, encoding="utf-8-sig", newline="\n") as text:
                yield text
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x}"
        raise ValueError(f"{path}: {byte} in it is not UTF-8, so the file is neither JSON nor parquet") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _listed(path: str | os.PathLike[str], file: TextIO) -> Iterator[Item]:
    """The items of a JSON list whose bracket has been read, without holding the text of more than some of them."""
    decode = json.JSONDecoder().raw_decode
    text, place, number = file.read(_BLOCK), 0, 0
    while True:
        try:
            place = _SPACE.match(text, place).end()
            if number == 0 and text[place] == "]":
                raise _no_list(path, [])
            value, end = decode(text, place)
            end = _SPACE.match(text, end).end()
            mark = text[end]
        except (json.JSONDecodeError, RecursionError, IndexError) as error:
            # Twice as much each time, so that an item of any size is tried a few times only.
            more = file.read(max(_BLOCK, len(text) - place))
            if not more:
                raise ValueError(f"{path}: not JSON: item {number}: {getattr(error, 'msg', 'the list breaks off')}") from None
            text, place = text[place:] + more, 0
            continue
        yield _item(f"{path}: item {number}", value)
        number, place = number + 1, end + 1
        if mark == "]":
            break
        if mark != ",":
            raise ValueError(f"{path}: not JSON: a comma is needed between items {number - 1} and {number}, got {mark!r}")
    if (text[place:] + file.read()).strip():
        raise ValueError(f"{path}: not JSON: there is more behind the end of the list")


def _lines_or_articles(path: str | os.PathLike[str], file: TextIO) -> Iterator[Item]:
    """The items of JSON lines, or, where the first line is not an object or is all of SQuAD's layout, the articles."""
    lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
    number, line = next(lines)
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = _parse(path, line + file.read())
        lines = iter(())
    else:
        if "data" not in found:
            yield Item(f"{path}: line {number}", found)
            for number, line in lines:
                yield _item(f"{path}: line {number}", _parse(f"{path}: line {number}", line))
            return
    if "data" not in found:
        raise _no_list(path, found)
    del line
    if next(lines, None):
        raise ValueError(f"{path}: not JSON: there is more behind the end of the object")
    for article in Item(str(path), found).objects("data", "article", parent=": "):
        yield Item(article.where, article.fields, is_article=True)


def _parse(where: str | os.PathLike[str], text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from None


def _no_list(path: str | os.PathLike[str], found: Any) -> ValueError:
    needed = "a JSON list with at least one item is needed, as in the official files"
    return ValueError(f"{path}: {needed}, got {repr(found)[:40]}")


def _rows(path: str | os.PathLike[str]) -> Iterator[Item]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=_ROWS):
            for row in batch.to_pylist():
                yield _item(f"{path}: row {number}", row)
                number += 1
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    if not number:
        raise ValueError(f"{path}: a parquet file with at least one row is needed")


def _item(where: str, value: Any) -> Item:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: an object is needed, got {repr(value)[:40]}")
    return Item(where, value)
