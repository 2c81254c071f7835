"""Render pages and Markdown from memrl/report/templates, and mark words in them. jinja2 is imported when a page is made."""

from __future__ import annotations

import difflib
import html
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from memrl.utils.plain_text import printable

LONGEST = 500  # characters of a name or reason in Markdown


def render(template: str, **values: Any) -> str:
    """Render a template by its file name. Values are text: they are escaped as the format of the template needs it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        finalize=escape_markdown if template.endswith(".md.j2") else None,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"commas": "{:,}".format, "number": format_number, "highlighted": highlighted}
    environment.globals |= {"word_changes": word_changes}
    return environment.get_template(template).render(values)


def escape_markdown(value: object) -> Markup:
    """Text as one line of Markdown that shows it unchanged: no HTML, no formatting, no end of a table's cell."""
    if isinstance(value, Markup):
        return value
    text = html.escape(printable(str(value), LONGEST), quote=False)
    # An underscore within a word formats nothing.
    return Markup(re.sub(r"[\\`*~$|\[\]]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text))


def format_number(value: object, sign: str = "") -> str:
    """Three significant digits; "-" for None, other values as text."""
    if isinstance(value, int | float):
        return f"{value:{sign if value else ''}.3g}"
    return "-" if value is None else str(value)


def highlighted(text: str, spans: Sequence[tuple[int, int]]) -> Markup:
    """`text` as HTML with the spans marked; they are in order and do not overlap."""
    cuts = [0, *(edge for span in spans for edge in span), len(text)]
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    pieces[1::2] = [Markup("<mark>{}</mark>").format(piece) for piece in pieces[1::2]]
    return Markup("").join(pieces)


def changes(old: str, new: str) -> list[tuple[str, str]]:
    """The words of both texts in order, as runs of ("keep" | "drop" | "add", text)."""
    old_words, new_words = (re.findall(r"\s*\S+\s*|\s+", text) for text in (old, new))
    runs = []
    matcher = difflib.SequenceMatcher(None, [word.strip() for word in old_words], [word.strip() for word in new_words])
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal" and i1 < i2:
            runs.append(("drop", "".join(old_words[i1:i2])))
        if j1 < j2:
            runs.append(("keep" if tag == "equal" else "add", "".join(new_words[j1:j2])))
    return runs


def word_changes(old: str, new: str) -> Markup:
    """`new` as HTML, with added words in <ins> and the dropped words of `old` in <del>."""
    forms = {"keep": Markup("{}{}"), "drop": Markup("<del>{}</del>{}"), "add": Markup("<ins>{}</ins>{}")}
    pieces = []
    for kind, text in changes(old, new):
        words = text.rstrip()
        pieces.append(forms[kind].format(words, text[len(words) :] or (" " if kind == "drop" else "")))
    return Markup("").join(pieces)
