"""Show text of others (documents, answers, replies of servers, file names) on a terminal: one line, bounded, no escapes."""

import re
import unicodedata

LONGEST_REASON = 500  # characters
ERROR_CHARACTERS = 300
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # control characters, direction marks, half surrogate pairs, separators of lines
_JOINERS = "\u200c\u200d"  # belong to words of Persian or Hindi, and to emoji


def printable(text: str, limit: int = 200) -> str:
    r"""`text` in one line of at most `limit` characters: blanks become one space, hidden characters escapes, the rest is cut.

    A terminal obeys the escape sequences in what it prints: they can clear the screen, change its title or hide text.

    >>> printable("red\n fox \x1b[2J", 80)
    'red fox \\x1b[2J'
    >>> printable("abcdef", 5)
    'ab...'
    """
    words = " ".join(text[: 4 * limit].split())  # enough for ordinary text; the rest of 1 GB is not looked at
    shown, length = [], 0
    for character in words:
        hidden = unicodedata.category(character) in _HIDDEN and character not in _JOINERS
        shown.append(character.encode("unicode_escape").decode("ascii") if hidden else character)
        length += len(shown[-1])
        if length > limit:
            break
    line = "".join(shown)
    is_cut = len(line) > limit or len(text) > 4 * limit
    return f"{line[: max(0, limit - 3)]}..." if is_cut else line


def reason_of(error: BaseException) -> str:
    """Why a reading failed, in one line; without an endpoint's number of tries, so that equal failures have equal texts.

    Raises what ends the whole run (Ctrl-C, a server that is down) again. A panic of a library written in Rust, such as the
    tokenizer's, is a BaseException, but concerns one document.
    """
    if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
        raise error
    lines, name = str(error).strip().splitlines(), type(error).__name__
    reason = re.sub(r" \(try \d+ of \d+\)$", "", lines[0]) if lines else ""
    return printable(f"{name}: {reason}" if reason else name, LONGEST_REASON)


def one_line(error: BaseException) -> str:
    """Type and message in one line of at most ERROR_CHARACTERS, without control characters."""
    try:
        name = type(error).__name__
        try:
            text = f"{name}: {str(error)[: 10 * ERROR_CHARACTERS]}"
        except BaseException:  # a class may define __str__ as it likes
            text = f"{name}, whose message cannot be printed"
    except BaseException:
        text = "an exception that cannot be printed"
    text = " ".join(text.split()).removesuffix(":")
    text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return text if len(text) <= ERROR_CHARACTERS else text[: ERROR_CHARACTERS - 3] + "..."
