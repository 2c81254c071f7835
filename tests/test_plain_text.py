"""Text of others is shown in one line, bounded and without control characters."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memrl.utils.plain_text import printable


@given(st.text(max_size=80), st.integers(3, 60))
def test_any_text_is_one_bounded_line_that_a_terminal_does_not_obey(text, limit):
    shown = printable(text, limit)
    assert len(shown) <= limit and len(shown.splitlines()) < 2
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\u200c\u200d" for c in shown)
    shown.encode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Größe 12 µm, 北京, می‌خواهم", "Größe 12 µm, 北京, می‌خواهم"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\u202egnp.exe \x9b2J", r"\u202egnp.exe \x9b2J"),
        ("a \ud800", r"a \ud800"),
        ("two\r\nlines\tof text ", "two lines of text"),
        ("", ""),
    ],
)
def test_ordinary_text_stays_and_hidden_characters_become_escapes(text, shown):
    assert printable(text, 100) == shown


def test_long_text_is_cut():
    assert printable("a" * 10**8, 20) == "a" * 17 + "..." and printable(" " * 100 + "b", 20).endswith("...")
    assert printable("abcde", 5) == "abcde" and printable("abcdef", 5) == "ab..."
