"""What a failed request means: whether it is tried again, when, and the reason in a few words."""

from __future__ import annotations

import asyncio
import os
import re
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from urllib.parse import urljoin

from openai import APIError, APIStatusError, APITimeoutError

from memrl.endpoint.addresses import public_url

LONGEST_WAIT_S = 300.0  # a request with a longer Retry-After fails at once
LONGEST_BACKOFF_S = 60.0


class EndpointError(ConnectionError):
    """A failed request, described in one line; `status` is that of the HTTP answer, None without a readable one."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class EndpointDown(BaseException):
    """The server answers nothing any more, so the run ends: not an Exception, so that no document records it as its error."""


class BadReply(ValueError):
    """What the server sent cannot be used; `is_temporary` if another attempt may bring something else."""

    def __init__(self, message: str, is_temporary: bool = True):
        super().__init__(message)
        self.is_temporary = is_temporary


# asyncio's TimeoutError is not the built-in one in Python 3.10. The client parses errors itself, so their depth may be its end.
CAUGHT = (APIError, asyncio.TimeoutError, BadReply, ValueError, RecursionError)


def is_temporary(error: Exception) -> bool:
    """Whether the same request may succeed later: the server is unreachable, busy or broken, rather than refusing it."""
    bad = find_bad_reply(error)
    status = getattr(error, "status_code", None)
    return bad.is_temporary if bad else status is None or status in (408, 409, 429) or status >= 500


def is_unreachable(error: Exception) -> bool:
    # By name: which HTTP library these classes belong to depends on the release of openai.
    return type(error.__cause__).__name__ in ("ConnectError", "ConnectTimeout")


def find_bad_reply(error: BaseException) -> BadReply | None:
    """The BadReply among the causes of an error: some releases of openai wrap what is raised while an answer is read."""
    return next((link for link in _chain(error) if isinstance(link, BadReply)), None)


def backoff(attempt: int, first_wait: float, seed: int) -> float:
    """Seconds to wait after attempt number `attempt` (from 0): w (1 + u) / 2, w = min(first_wait 2^attempt, 60), u in [0, 1).

    u comes from the 63-bit `seed`, so that requests that failed together are not repeated together.
    """
    return min(first_wait * 2 ** min(attempt, 64), LONGEST_BACKOFF_S) * (1 + seed / 2**63) / 2


def retry_after(error: Exception) -> float:
    """Seconds in the Retry-After header, given as a number or a date (RFC 9110, 10.2.3); 0 without one, or for anything else."""
    value = error.response.headers.get("retry-after", "") if isinstance(error, APIStatusError) else ""
    if re.fullmatch(r"\s*\d{1,9}(\.\d{1,9})?\s*", value, re.ASCII):
        return float(value)
    try:
        date = parsedate_to_datetime(value)
        return max(0.0, (date.replace(tzinfo=date.tzinfo or timezone.utc) - datetime.now(timezone.utc)).total_seconds())
    except (ValueError, TypeError, IndexError, OverflowError):  # the parser of the standard library lets through all of them
        return 0.0


def describe(error: Exception, timeout: float) -> str:
    """The reason of a failure: the server's own message if there is one."""
    if bad := find_bad_reply(error):
        return str(bad)
    if isinstance(error, APIStatusError):
        return f"HTTP {error.status_code}: {_explain_status(error)}"
    if isinstance(error, (asyncio.TimeoutError, APITimeoutError)):
        return f"no answer within {timeout:g} s"
    return _root_message(error).strip() or type(error).__name__


def _explain_status(error: APIStatusError) -> str:
    location = error.response.headers.get("location")
    if 300 <= error.status_code < 400 and location:
        # The key would go to the new address: the HTTP client removes only one of the headers that hold it.
        return f"it redirects to {_public(str(error.request.url), location)}; this is not followed, so give the final address"
    message = error.body.get("message") if isinstance(error.body, dict) else error.body
    if not isinstance(message, str) or not message.strip():
        message = error.response.text.strip() or "an empty answer"
    return message


def _public(url: str, location: str) -> str:
    try:
        return public_url(urljoin(url, location))
    except ValueError:
        return "something that is not an address"


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def _root_message(error: BaseException) -> str:
    """The operating system's message (connection refused, name not known) from a chain of errors; else the first cause's."""
    chain = _chain(error)
    for link in reversed(chain):
        if isinstance(link, OSError) and link.strerror:  # asyncio replaces the message; an unknown name has a negative number
            return os.strerror(link.errno) if link.errno and link.errno > 0 else link.strerror
    return str(chain[min(1, len(chain) - 1)])
