"""Describe failed requests: whether and when to retry, and a message in one line."""

import asyncio
import json
import os
import re
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from openai import APIError, APIStatusError, APITimeoutError

LONGEST_BACKOFF_S = 60.0
# asyncio's TimeoutError is not the built-in one in Python 3.10; a body that is not JSON raises a ValueError.
CAUGHT = (APIError, asyncio.TimeoutError, ValueError)


class EndpointError(ConnectionError):
    """A failed request, described in one line; `status` is that of the HTTP answer, None without a readable one."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class EndpointDown(BaseException):
    """The server cannot be reached any more, so the run ends: not an Exception, so that no document records it as its error."""


def backoff(attempt: int, first_wait: float, seed: int) -> float:
    """Seconds to wait after attempt number `attempt` (from 0): w (1 + u) / 2, w = min(first_wait 2^attempt, 60), u in [0, 1).

    u comes from the 63-bit `seed`, so that requests that failed together are not repeated together.
    """
    return min(first_wait * 2 ** min(attempt, 64), LONGEST_BACKOFF_S) * (1 + seed / 2**63) / 2


def retry_after(error: Exception) -> float:
    """Seconds in the Retry-After header, given as a number or a date (RFC 9110, 10.2.3); 0 without one."""
    value = error.response.headers.get("retry-after", "") if isinstance(error, APIStatusError) else ""
    if re.fullmatch(r"\s*\d{1,9}(\.\d+)?\s*", value, re.ASCII):
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or timezone.utc) - datetime.now(timezone.utc)).total_seconds())


def describe(error: Exception, timeout: float) -> str:
    """The reason of a failure in one line: the server's own message if there is one."""
    if isinstance(error, APIStatusError):
        message = error.body.get("message") if isinstance(error.body, dict) else error.body
        if not isinstance(message, str) or not message.strip():
            message = error.response.text or str(error)
        return f"HTTP {error.status_code}: {_one_line(message)}"
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
        return "the answer is not JSON"
    if isinstance(error, (asyncio.TimeoutError, APITimeoutError)):
        return f"no answer within {timeout:g} s"
    return _one_line(_root_message(error)) or type(error).__name__


def _root_message(error: BaseException) -> str:
    """The operating system's message (connection refused, name not known) from a chain of errors; else the first cause's."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    for link in reversed(chain):
        if isinstance(link, OSError) and link.strerror:  # asyncio replaces the message; an unknown name has a negative number
            return os.strerror(link.errno) if link.errno and link.errno > 0 else link.strerror
    return str(chain[min(1, len(chain) - 1)])


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
