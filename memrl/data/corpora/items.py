"""Read the items of a JSON, JSON lines or parquet file one at a time, and check their fields."""

import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from memrl.data.json_values import MOST_BYTES, check_values
from memrl.utils.bounded_files import bounded_int, open_regular

_BLOCK = 2**20  # characters of a JSON list read at a time
_ROWS = 256  # rows of a parquet file read at a time
_NOT_SPACE = re.compile(r"[^ \t\n\r]")


@dataclass(frozen=True)
class Item:
    """An object in a file.

    Attributes:
        where: file and item, for error messages.
        is_article: the item is an entry of `data` in SQuAD's layout.
    """

    where: str
    fields: dict[str, Any]
    is_article: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.fields, dict):
            raise ValueError(f"{self.where}: an object is needed, got {_seen(self.fields)}")

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.where}: {problem}")

    def wrong(self, field: str, allowed: str) -> ValueError:
        return self.error(f"{field}: {allowed} is needed, got {_seen(self.fields.get(field))}")

    def named(self, name: str) -> "Item":
        return replace(self, where=f"{self.where} ({name})")

    def text(self, field: str) -> str:
        """A field that must hold text that is not blank."""
        value = self.fields.get(field)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(field, "a text that is not blank")
        return self.checked(field, value)

    def checked(self, field: str, value: str) -> str:
        """The value, if UTF-8 can encode it."""
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.error(f"{field}: character {error.start} is half a surrogate pair, which no text can hold") from None
        return value

    def list_of(self, field: str) -> list[Any]:
        """A field that must hold a list, at least one entry long."""
        value = self.fields.get(field)
        if not isinstance(value, list) or not value:
            raise self.wrong(field, "a list, at least one entry long,")
        return value

    def objects(self, field: str, name: str, separator: str = ", ") -> list["Item"]:
        """A field that must hold a list of objects, at least one; error messages call them `name`."""
        value = self.fields.get(field)
        if not isinstance(value, list) or not value:
            raise self.wrong(field, "a list of objects, at least one,")
        return [Item(f"{self.where}{separator}{name} {number}", entry) for number, entry in enumerate(value)]


def read_items(path: str | os.PathLike[str]) -> Iterator[Item]:
    """The objects of a JSON list, of JSON lines, of a parquet file, or of the list `data` in a JSON object; at least one.

    Items of a list, lines and rows are read one after the other, so a large file never has to fit into memory; an object with
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
            return (yield from _listed(path, file))
        file.seek(0)
        if first != "{":
            raise _no_list(path, _parse(path, file.read(_BLOCK)))
        yield from _lines_or_articles(path, file)


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[TextIO | None]:
    """The decompressed text of the file, None for parquet. Errors while reading it become ValueErrors."""
    try:
        with open_regular(Path(path)) as file:
            start = file.peek(4)
            if start.startswith(b"PAR1"):
                yield None
                return
            unpacked = gzip.GzipFile(fileobj=file) if start.startswith(b"\x1f\x8b") else file
            # Lines end in "\n" only: a JSON text may contain the other line separators.
            with TextIOWrapper(unpacked, encoding="utf-8-sig", newline="\n") as text:
                yield text
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x}"
        raise ValueError(f"{path}: {byte} in it is not UTF-8, so the file is neither JSON nor parquet") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _listed(path: str | os.PathLike[str], file: TextIO) -> Iterator[Item]:
    """The items of a JSON list whose bracket has been read."""
    number = -1
    for number, (value, _, _) in enumerate(listed_values(path, file)):
        yield Item(f"{path}: item {number}", value)
    if number < 0:
        raise _no_list(path, [])


def listed_values(path: str | os.PathLike[str], file: TextIO, begin: int = 0) -> Iterator[tuple[Any, int, str]]:
    """(value, place of its text in bytes, its text) of the items of a JSON list whose bracket has been read.

    The text of some of them is held at a time. Not ijson: it turns half a surrogate pair into "?", and its memory grows with the
    square of the nesting depth.

    Args:
        begin: place of the first character to read, in bytes.
    """
    decode = json.JSONDecoder(parse_int=bounded_int).raw_decode
    text, place, number, mark = file.read(_BLOCK), 0, 0, ","
    while mark == ",":
        try:
            start = _skip_space(text, place)
            if number == 0 and text[start] == "]":
                return
            value, end = decode(text, start)
            mark = text[following := _skip_space(text, end)]
        except (json.JSONDecodeError, RecursionError, IndexError) as error:
            text, place = text[place:], 0
            # Twice as much each time, so that even a very large item is decoded only a few times.
            more = file.read(max(_BLOCK, len(text)))
            if not more or len(text) > MOST_BYTES or isinstance(error, RecursionError):
                problem = f"is longer than {MOST_BYTES >> 20} MiB" if more else getattr(error, "msg", "the list breaks off")
                problem = "lists and objects in each other, too deep" if isinstance(error, RecursionError) else problem
                raise ValueError(f"{path}: not JSON: item {number}: {problem}") from None
            text += more
            check_values(text)
            continue
        except ValueError as error:
            raise ValueError(f"{path}: item {number}: {error}") from None
        begin += _num_bytes(text[place:start])
        yield value, begin, text[start:end]
        begin += _num_bytes(text[start : following + 1])
        number, place = number + 1, following + 1
    if mark != "]":
        raise ValueError(f"{path}: not JSON: a comma is needed between items {number - 1} and {number}, got {mark!r}")
    if (text[place:] + file.read(_BLOCK)).strip():
        raise ValueError(f"{path}: not JSON: there is more after the end of the list")


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _skip_space(text: str, place: int) -> int:
    """The next place that is not JSON's white space, or the end of the text."""
    found = _NOT_SPACE.search(text, place)
    return found.start() if found else len(text)


def _lines_or_articles(path: str | os.PathLike[str], file: TextIO) -> Iterator[Item]:
    """The objects of JSON lines; if the first one holds `data`, the articles in it (SQuAD's layout)."""
    lines = ((number, line) for number, line in enumerate(iter(partial(_read, path, file.readline), ""), start=1) if line.strip())
    number, line = next(lines)
    try:
        found = _parse(path, line)
    except ValueError:  # one object on several lines
        found = _parse(path, line + _read(path, file.read))
        if not isinstance(found, dict) or "data" not in found:
            raise _no_list(path, found) from None
        lines = iter(())
    if "data" in found:
        if next(lines, None):
            raise ValueError(f"{path}: not JSON: there is more after the end of the object")
        for article in Item(str(path), found).objects("data", "article", separator=": "):
            yield replace(article, is_article=True)
        return
    yield Item(f"{path}: line {number}", found)
    for number, line in lines:
        where = f"{path}: line {number}"
        yield Item(where, _parse(where, line))


def _read(path: str | os.PathLike[str], read: Callable[[int], str]) -> str:
    text = read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"{path}: has an object or a line of more than {MOST_BYTES >> 20} MiB")
    return text


def _parse(where: str | os.PathLike[str], text: str) -> Any:
    try:
        check_values(text)
        return json.loads(text, parse_int=bounded_int)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from None


def _no_list(path: str | os.PathLike[str], found: Any) -> ValueError:
    needed = "a JSON list with at least one item is needed, as in the official files"
    return ValueError(f"{path}: {needed}, got {_seen(found)}")


def _rows(path: str | os.PathLike[str]) -> Iterator[Item]:
    from memrl.data.columns import read_rows

    number = -1
    for number, row in enumerate(read_rows(Path(path))):
        yield Item(f"{path}: row {number}", row)
    if number < 0:
        raise ValueError(f"{path}: a parquet file with at least one row is needed")


def _seen(value: Any) -> str:
    try:
        return repr(value)[:40]
    except RecursionError:
        return "lists and objects in each other"
