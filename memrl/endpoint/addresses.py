"""A server's address and key: what is sent, and what may be shown or stored."""

import os
import re
from base64 import b64encode
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

from memrl.utils.plain_text import printable

KEY_VARIABLE = "OPENAI_API_KEY"
HIDDEN = "[hidden]"
SHORTEST_SECRET = 8  # what people give instead of a key (none, EMPTY, dummy) is shorter, and may be a word of any text


def read_key() -> str:
    """The key in OPENAI_API_KEY, "none" without one; ValueError, which does not show it, if it holds what no key holds."""
    key = os.environ.get(KEY_VARIABLE) or "none"
    if not re.fullmatch(r"[!-~]+", key):
        raise ValueError(
            f"{KEY_VARIABLE} holds a blank, a line break or a letter that no key has, perhaps at its end; set it again without"
        )
    return key


def split_url(url: str) -> tuple[str, dict[str, str]]:
    """The part of an address before /chat/completions (/v1 if it has no path), and its query; ValueError if it is no address."""
    url = url.strip()
    try:
        parts = urlsplit(url)
        usable = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and bool(re.fullmatch(r"[!-~]+", url))
        )
    except ValueError:  # of a wrong port or bracket
        parts, usable = urlsplit(""), None
    if not usable:
        shown = "" if re.search(r"[@?]", url) else f" {printable(url)!r}"  # not what may hold a password
        raise ValueError(f"endpoint{shown} is not an address; give one like http://localhost:8000/v1")
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return urlunsplit((parts.scheme, parts.netloc, path or "/v1", "", "")), dict(parse_qsl(parts.query))


def public_url(url: str) -> str:
    """An address as it may be shown and stored: without user, password and query, and without the key if that is in the path."""
    parts = urlsplit(url.strip())
    return redact(urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")), url)


def redact(text: str, url: str = "") -> str:
    """`text` with the key, and the passwords and keys in the address `url`, replaced wherever they stand.

    Found by value, in any message and any answer: a server may echo them.

    >>> redact("no user of mine: bob:correct-horse", "http://bob:correct-horse@localhost")
    'no user of mine: bob:[hidden]'
    """
    for secret in _secrets(url, os.environ.get(KEY_VARIABLE, "")):
        text = text.replace(secret, HIDDEN)
    return text


def _secrets(url: str, key: str) -> list[str]:
    """All spellings of the secrets, the longest first, because one may hold another."""
    parts = urlsplit(url.strip())
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    queried = [value for name, value in parse_qsl(parts.query) if "version" not in name.lower()]
    plain = [key.strip(), unquote(password or user), *queried]  # a user without a password is a key
    if user:  # how it is sent
        plain.append(b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode())
    spellings = {
        spelling for secret in plain for spelling in (secret, quote(secret, safe=""), quote(secret), secret.replace("/", "\\/"))
    }
    return sorted((spelling for spelling in spellings if len(spelling) >= SHORTEST_SECRET), key=len, reverse=True)
