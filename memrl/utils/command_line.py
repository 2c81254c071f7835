"""What the three entry points share: strict parsing, and mistakes told in one line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class Parser(ArgumentParser):
    """A jsonargparse parser that answers a mistake with one line instead of the whole usage."""

    def parse_args(self, *args, **kwargs) -> Namespace:
        settings = super().parse_args(*args, **kwargs)
        for name, default in vars(self.get_defaults()).items():
            if isinstance(default, Namespace) and settings[name] is None:  # "rl:" with every line below commented out
                self.error(f"the section {name!r} is empty; give it a setting or remove its line")
        return settings

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        fail(" ".join(message.split()))


def fail(message: str) -> NoReturn:
    """One line on standard error, exit code 2: the user's input is wrong and nothing was lost.

    Under torchrun one line per machine: its ranks read the same input.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn what bad input raises (ValueError, missing or unreadable files) into one line and exit code 2.

    MEMRL_TRACEBACK=1 shows where it came from.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if os.environ.get("MEMRL_TRACEBACK"):
            raise
        if isinstance(error, OSError) and error.filename is not None:
            fail(f"{error.filename}: {error.strerror}")
        fail(" ".join(str(error).split()) or type(error).__name__)
