"""Parse JSON from elsewhere within bounds of size, number of values and length of numbers."""

import json
from typing import Any

from memrl.utils.bounded_files import bounded_int, unique_keys

MOST_BYTES = 2**28  # of a row, an item or a document: 60 million tokens; the paper's longest documents have 3.5 million, 16 MB
VALUES = 2 * 10**6  # values in a row or an item; SQuAD's training file, one object, has 1.3 million
UNCOUNTED = 2**23  # characters up to which values are not counted, since they take 0.2 GB at most


def parse_json(text: bytes) -> Any:
    """A JSON value in UTF-8; a ValueError says what is wrong."""
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte 0x{text[error.start]:02x} at {error.start} is not UTF-8; save the file as UTF-8") from None
    check_values(decoded)
    try:
        return json.loads(decoded, object_pairs_hook=unique_keys, parse_int=bounded_int)
    except RecursionError:
        raise ValueError("not JSON: lists and objects in each other, too deep to be read") from None


def check_values(text: str) -> None:
    """Raise ValueError if JSON text has more than VALUES values: a list of empty lists takes 20 times its text in memory."""
    if len(text) <= UNCOUNTED or _num_marks(text) <= VALUES:
        return
    bare = text.replace("\\\\", "").replace('\\"', "")  # every quote that is left begins or ends a text
    if bare.count('"') > 4 * VALUES or sum(map(_num_marks, bare.split('"')[::2])) > VALUES:
        raise ValueError(f"more than {VALUES} values; a document is one text")


def _num_marks(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")


def shown(name: str) -> str:
    """The beginning of a name, in characters that every file can hold."""
    return name[:60].encode("utf-8", "backslashreplace").decode()


def describe(value: Any) -> str:
    """A value for an error message: its type, and its first 60 characters."""
    names = {dict: "an object", list: "a list", str: "the text", bool: "the truth value", type(None): "null"}
    try:
        text = json.dumps(value[:61] if isinstance(value, str | list) else value, default=str)
    except (RecursionError, ValueError):
        text = "..."
    limited = text if len(text) <= 60 else text[:57] + "..."
    return "null" if value is None else f"{names.get(type(value), 'the number')} {limited}"
