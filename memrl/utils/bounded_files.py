"""Read files from elsewhere within bounds: JSON of models and runs, YAML of settings and prompts."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import yaml

JSON_BYTES = 16 * 2**20  # the largest published file of this kind, DeepSeek-V3's index of 91,991 tensors, has 9 MB
YAML_BYTES = 2**20  # a run's settings have 5 kB, a prompt file 3 kB
MAX_NODES = 3000  # values and names, with those that aliases stand for; a run's settings have 150
MAX_DIGITS = 300  # of a whole number, so that it can become a float; tokenizer_config.json has numbers of 31 digits


def read_bounded(path: str | Path, limit: int) -> bytes:
    """The bytes of a regular file with at most `limit` bytes; ValueError naming the path for anything else.

    For files from elsewhere: a pipe would block, and a device could be read without end.
    """
    with reading(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path} is larger than {limit / 2**20:g} MiB, which is too large for a file of this kind")
    return content


@contextmanager
def reading(path: str | Path) -> Iterator[BufferedReader]:
    """`open_regular` as a context, in which every error of the operating system becomes a ValueError naming the path."""
    try:
        with open_regular(path) as file:
            yield file
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading; ValueError naming the path for a pipe or a device, OSError as `open`."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} is a pipe or a device; it must be a regular file")
    return file


def read_json(path: str | Path, limit: int = JSON_BYTES) -> Any:
    """The value in a JSON file from elsewhere; ValueError naming the path if it is not JSON, or absurdly large or deep.

    A key that stands twice is refused: `json` would silently take the last one.
    """
    content = read_bounded(path, limit)
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=unique_keys, parse_int=bounded_int)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be read") from None
    except ValueError as error:  # undecodable bytes and JSON errors alike
        raise ValueError(f"{path} is not valid JSON ({error})") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r} stands twice")
    return found


def bounded_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


class _Loader(yaml.SafeLoader):
    """Counts the values while they are composed, those of an alias again, and refuses keys that stand twice.

    Without that, ten short lines of aliases ("billion laughs") would stand for 10^9 values.
    """

    def __init__(self, stream: str):
        super().__init__(stream)
        self.num_nodes, self._sizes = 0, dict[str, int]()

    def compose_node(self, parent, index):
        event, before = self.peek_event(), self.num_nodes
        anchor: str | None = getattr(event, "anchor", None)
        if anchor is not None and isinstance(event, yaml.AliasEvent) and anchor in self.anchors:
            self.num_nodes += self._sizes.get(anchor, MAX_NODES)  # without a size yet: the alias is inside of what it stands for
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise yaml.YAMLError(f"more than {MAX_NODES} values, or an alias of itself; an alias counts as what it stands for")
        node = super().compose_node(parent, index)
        if anchor is not None:
            self._sizes[anchor] = self.num_nodes - before
        return node

    def construct_yaml_int(self, node):
        if len(node.value) > MAX_DIGITS:  # also 1:1:1:..., base 60, whose evaluation takes quadratic time
            raise yaml.YAMLError(f"a number of {len(node.value)} characters")
        return super().construct_yaml_int(node)

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.YAMLError(f"the key {key.value!r} stands twice")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse_yaml(text: str, source: str | Path) -> object:
    """The value of a YAML text; ValueError naming `source` if it is not YAML, or absurdly large or deep."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise ValueError(f"{source} is nested too deeply to be read") from None
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:  # for bad values
        reason = " ".join(str(error).split())
        raise ValueError(f"{source} is not a YAML file: {reason[:200]}") from None


def read_yaml(path: str | Path) -> object:
    """The contents of a YAML file; ValueError naming the path if it is not one, or absurdly large or deep."""
    try:
        return parse_yaml(read_bounded(path, YAML_BYTES).decode("utf-8"), path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a YAML file: {error}") from None
