"""Words for keys and lists: an adjective and a noun, joined by a hyphen, as in `brave-otter`.

No adjective ends with another one and no noun begins with another one, so no such word is part of another one: a text contains a
word if and only if it contains the word's characters.
"""

from pathlib import Path

import yaml

_LISTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
ADJECTIVES: list[str] = _LISTS["adjectives"].split()
NOUNS: list[str] = _LISTS["nouns"].split()
NUM_WORDS = len(ADJECTIVES) * len(NOUNS)


def word(number: int) -> str:
    """The word of a number from 0 to NUM_WORDS - 1; different numbers have different words."""
    adjective, noun = divmod(number, len(NOUNS))
    return f"{ADJECTIVES[adjective]}-{NOUNS[noun]}"
