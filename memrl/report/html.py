"""What the pages share: the frame with its style, and a card that shows how a memory changed."""

import difflib
import re
from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --line: #d6d6d6; --soft: #6b6b6b; --page: #fff;
  --new: #d8f0dc; --old: #f6dcdc; --card: #fafafa; --mark: #ffe08a;
  --held: #2e8b57; --lost: #c0392b; --seen: #d9820b; --none: #dcdcdc }
@media (prefers-color-scheme: dark) {
  :root { --line: #444; --soft: #a0a0a0; --page: #121212; --new: #1f4a2a; --old: #552a2a; --card: #1d1d1d; --mark: #6b5200;
    --held: #37a367; --lost: #d9534f; --seen: #e8a33d; --none: #3a3a3a } }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; background: var(--page) }
h1 { font-size: 1.3rem } h2 { font-size: 1.1rem; margin: 2.5rem 0 .3rem }
.soft { color: var(--soft); font-size: .85rem }
.card { border: 1px solid var(--line); border-radius: .5rem; background: var(--card);
  padding: .6rem .9rem; margin: .7rem 0 }
.answer { border-width: 2px; font-size: 1.1rem }
.error, .cut { color: var(--lost) }
.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: .35rem 0 0 }
ins { background: var(--new); text-decoration: none; border-radius: .2rem }
del { background: var(--old); color: var(--soft); border-radius: .2rem }
mark { background: var(--mark); color: CanvasText; border-radius: .2rem; font-weight: 600 }
summary { cursor: pointer }
.strip { display: flex; flex-wrap: wrap; gap: .25rem; margin: .35rem 0 }
.box { width: 1.35rem; height: 1.35rem; line-height: 1.35rem; text-align: center; font-size: .75rem; font-weight: 700;
  border-radius: .25rem; background: var(--none); color: inherit; text-decoration: none; box-sizing: content-box;
  border: 3px solid transparent }
.box.evidence { border-color: var(--seen) }
.box.held { background: var(--held); color: #fff } .box.lost { background: var(--lost); color: #fff }
.badge { font-size: .78rem; font-weight: 600; border-radius: .3rem; padding: .05rem .4rem; border: 1px solid currentColor }
.badge.evidence { color: var(--seen) } .badge.held { color: var(--held) } .badge.lost { color: var(--lost) }
.index { width: 100%; border-collapse: collapse; font-size: .85rem }
.index td, .index th { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; border-top: 1px solid var(--line) }
.index .box { width: .75rem; height: .75rem; line-height: .75rem; font-size: .6rem; border-width: 2px }
a { color: inherit }
"""
# A page made of a stranger's document must not be able to run or load anything, even past a forgotten escape.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page; `title` is text, `parts` are HTML."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>\n</head>\n<body>",
            *parts,
            "</body>\n</html>\n",
        ]
    )


def memory_card(heading: str, old: str, new: str, more: str = "", anchor: str = "") -> str:
    """A memory as it became, with what came in and what was dropped; folded up where nothing changed.

    Args:
        heading, more: HTML above and below.
        old, new: the texts of the memory before and after.
        anchor: the card's id on the page.
    """
    place = f' id="{escape(anchor)}"' if anchor else ""
    if new != old:
        return f'<div class="card"{place}>{heading}<div class="text">{_marked(old, new)}</div>{more}</div>'
    summary = f'<summary>{heading}<span class="soft">, memory unchanged</span></summary>'
    return f'<details class="card"{place}>{summary}<div class="text">{escape(new)}</div>{more}</details>'


def highlighted(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """`text` as HTML with the spans marked; they are in order and do not overlap."""
    pieces, position = [], 0
    for start, end in spans:
        pieces.append(f"{escape(text[position:start])}<mark>{escape(text[start:end])}</mark>")
        position = end
    return "".join([*pieces, escape(text[position:])])


def changes(old: str, new: str) -> list[tuple[str, str]]:
    """Both texts' words in order, as runs of ("keep" | "drop" | "add", text)."""
    old_words, new_words = _words(old), _words(new)
    runs = []
    bare = [[word.strip() for word in words] for words in (old_words, new_words)]
    matcher = difflib.SequenceMatcher(None, *bare)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            runs.append(("keep", "".join(new_words[j1:j2])))
            continue
        if i1 < i2:
            runs.append(("drop", "".join(old_words[i1:i2])))
        if j1 < j2:
            runs.append(("add", "".join(new_words[j1:j2])))
    return runs


def _words(text: str) -> list[str]:
    return re.findall(r"\s*\S+\s*|\s+", text)


def _marked(old: str, new: str) -> str:
    tags = {"keep": ("", ""), "drop": ("<del>", "</del>"), "add": ("<ins>", "</ins>")}
    pieces = []
    for kind, text in changes(old, new):
        before, after = tags[kind]
        words = text.rstrip()
        gap = text[len(words) :] or (" " if kind == "drop" else "")
        pieces.append(f"{before}{escape(words)}{after}{escape(gap)}")
    return "".join(pieces)
