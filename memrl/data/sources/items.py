"""The items of a file, JSON, JSON lines or parquet, and the checks of their fields."""

import gzip
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


def read_items(path: str | os.PathLike[str]) -> list[Item]:
    """The objects of a JSON list, of JSON lines, of a parquet file, or of the list `data` in a JSON object; at least one.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    content = _read(path)
    if content.startswith(b"PAR1"):
        return [_item(f"{path}: row {number}", row) for number, row in enumerate(_rows(path))]
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8, so the file is neither JSON nor parquet") from None
    lines = _json_lines(path, text)
    if lines is not None:
        return lines
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if isinstance(found, dict) and "data" in found:
        articles = Item(str(path), found).objects("data", "article", parent=": ")
        return [Item(article.where, article.fields, is_article=True) for article in articles]
    if not isinstance(found, list) or not found:
        raise ValueError(f"{path}: a JSON list with at least one item is needed, as in the official files")
    return [_item(f"{path}: item {number}", item) for number, item in enumerate(found)]


def _item(where: str, value: Any) -> Item:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: an object is needed, got {repr(value)[:40]}")
    return Item(where, value)


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        content = Path(path).read_bytes()
        return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _json_lines(path: str | os.PathLike[str], text: str) -> list[Item] | None:
    """The items of JSON lines; None where the first line is not an object on its own, or is all of SQuAD's layout."""
    # By "\n" alone: a JSON text may hold the other line separators that str.splitlines() knows.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    try:
        first = json.loads(lines[0][1])
    except (ValueError, RecursionError, IndexError):
        return None
    if not isinstance(first, dict) or "data" in first:
        return None
    items = []
    for number, line in lines:
        try:
            items.append(_item(f"{path}: line {number}", json.loads(line)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number}: not JSON: {error}") from None
    return items


def _rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    if not rows:
        raise ValueError(f"{path}: a parquet file with at least one row is needed")
    return rows
