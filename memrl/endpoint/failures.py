"""What became of a request that brought no answer: may it pass, when to come back, and what to tell people."""

import os
import re
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

LONGEST_WAIT = 60.0  # seconds between two tries, where the server does not ask for more
_PASSING = {408, 409, 429}  # and everything from 500 on


class NoAnswer(ValueError):
    """An HTTP answer that counts as success and is no completion."""


def backoff(attempt: int, first_wait: float, seed: int) -> float:
    """Seconds to wait after try number `attempt` (from 0): w (1 + u) / 2, w = min(first_wait 2^attempt, 60), u in [0, 1).

    u comes from the 63-bit `seed`, so that requests that failed together do not come back together.
    """
    return min(first_wait * 2 ** min(attempt, 64), LONGEST_WAIT) * (1 + seed / 2**63) / 2


def asked_wait(error: Exception) -> float:
    """Seconds that the server asks to be left alone (Retry-After: a number or a date, RFC 9110, 10.2.3); 0 where it does not."""
    value = error.response.headers.get("retry-after", "") if hasattr(error, "response") else ""
    if re.fullmatch(r"\s*\d{1,9}(\.\d+)?\s*", value, re.ASCII):
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    if date.tzinfo is None:
        date = date.replace(tzinfo=timezone.utc)
    return max(0.0, (date - datetime.now(timezone.utc)).total_seconds())


def is_passing(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    status = getattr(error, "status_code", None)
    return status is None or status in _PASSING or status >= 500


def is_unreachable(error: Exception) -> bool:
    """Whether no connection came about at all."""
    # By name, because releases of openai differ in the library that they stand on.
    return type(error.__cause__).__name__ in ("ConnectError", "ConnectTimeout")


def names_parameter(error: Exception, name: str) -> bool:
    """Whether a refused request was refused for this parameter."""
    return getattr(error, "param", None) == name or bool(re.search(rf"(?<![A-Za-z_]){name}(?![A-Za-z_])", str(error)))


def reason(error: Exception, timeout: float) -> str:
    """Why a request failed, in one line: the server's own words where there are any."""
    status = getattr(error, "status_code", None)
    if status is not None:
        return f"HTTP {status}: {_one_line(_said(error))}"
    if isinstance(error, NoAnswer):
        return str(error)
    if isinstance(error, ValueError):
        return "what it sends is not JSON"
    if isinstance(error, TimeoutError) or type(error).__name__ in ("TimeoutError", "APITimeoutError"):
        return f"no answer within {timeout:g} s"
    return _one_line(_root_words(error)) or type(error).__name__


def _said(error: Exception) -> str:
    body = getattr(error, "body", None)
    said = body.get("message") if isinstance(body, dict) else body
    return said if isinstance(said, str) and said.strip() else error.response.text or str(error)


def _root_words(error: BaseException) -> str:
    """The system's words (connection refused, name not known) where a chain of errors holds some; else the first cause's."""
    chain = [error]
    while (below := chain[-1].__cause__ or chain[-1].__context__) is not None and below not in chain:
        chain.append(below)
    system = [link for link in chain if isinstance(link, OSError) and link.strerror]
    if not system:
        return str(chain[min(1, len(chain) - 1)])
    number = system[-1].errno or 0  # asyncio puts words of its own there; a name that is not known has a negative number
    return os.strerror(number) if number > 0 else system[-1].strerror


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
