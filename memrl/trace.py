"""A reading as a web page: the memory after each chunk and what changed in it. One file, no scripts."""

import difflib
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from memrl.files import write_whole
from memrl.progress import format_seconds
from memrl.reading import Reading, Step

_STYLE = """
:root { color-scheme: light dark; --line: #d6d6d6; --soft: #6b6b6b;
  --new: #d8f0dc; --old: #f6dcdc; --card: #fafafa }
@media (prefers-color-scheme: dark) {
  :root { --line: #444; --soft: #a0a0a0; --new: #1f4a2a; --old: #552a2a; --card: #1d1d1d } }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.3rem } h2 { font-size: 1.1rem; margin: 2.5rem 0 .3rem }
.soft { color: var(--soft); font-size: .85rem }
.card { border: 1px solid var(--line); border-radius: .5rem; background: var(--card);
  padding: .6rem .9rem; margin: .7rem 0 }
.answer { border-width: 2px; font-size: 1.1rem }
.error, .cut { color: #c0392b }
.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: .35rem 0 0 }
ins { background: var(--new); text-decoration: none; border-radius: .2rem }
del { background: var(--old); color: var(--soft); border-radius: .2rem }
summary { cursor: pointer }
"""
# A page made of a stranger's document must not be able to run or load anything, even past a forgotten escape.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_trace(path: str | Path, readings: Iterable[Reading]) -> None:
    """Write the page, whole or not at all."""
    readings = list(readings)
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>memrl: {len(readings)} reading{'s' * (len(readings) != 1)}</title>",
        f"<style>{_STYLE}</style>\n</head>\n<body>",
        "<h1>What was remembered</h1>",
        '<p class="soft">Each card is the memory after one chunk; <ins>green</ins> came in with the chunk, '
        "<del>red</del> was dropped. The answer was given from the last memory alone.</p>",
        *(_reading(reading) for reading in readings),
        "</body>\n</html>\n",
    ]
    write_whole(path, "\n".join(parts))


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


def _reading(reading: Reading) -> str:
    size = f"{reading.document_tokens:,} tokens in {reading.num_chunks:,} chunks"
    source = escape(str(reading.sample.metadata.get("file", reading.sample.id)))
    parts = [
        f"<h2>{escape(reading.sample.question)}</h2>",
        f'<p class="soft">{source}: {size}, {format_seconds(reading.seconds)}</p>',
    ]
    if reading.error is not None:
        parts.append(f'<div class="card answer error">{escape(reading.error)}</div>')
    elif reading.done:
        answer = escape(reading.answer)
        parts.append(f'<div class="card answer"><b>Answer</b><div class="text">{answer}</div></div>')
    memory, chunk = "", 0
    for step in reading.steps:
        if step.kind == "memory":
            parts.append(_chunk(reading, step, chunk, memory))
            memory, chunk = step.text, chunk + 1
        else:
            text = f'<div class="text">{escape(step.text)}</div>'
            parts.append(f'<div class="card"><b>Answer turn</b> {_facts(step)}{text}</div>')
    return "\n".join(parts)


def _chunk(reading: Reading, step: Step, chunk: int, memory: str) -> str:
    first = chunk * reading.chunk_tokens
    last = min(first + reading.chunk_tokens, reading.document_tokens)
    title = f"<b>Chunk {chunk + 1} of {reading.num_chunks}</b> {_facts(step)}"
    where = f'<span class="soft">, document tokens {first:,} to {last:,}</span>'
    if step.text == memory:
        body = f'<div class="text">{escape(step.text)}</div>'
        unchanged = f'<summary>{title}{where}<span class="soft">, memory unchanged</span></summary>'
        return f'<details class="card">{unchanged}{body}</details>'
    return f'<div class="card">{title}{where}<div class="text">{_marked(memory, step.text)}</div></div>'


def _facts(step: Step) -> str:
    ended = "" if step.finish_reason == "stop" else ' <span class="cut">cut off by the token cap</span>'
    return f'<span class="soft">{step.tokens} response tokens, {step.finish_reason}</span>{ended}'
