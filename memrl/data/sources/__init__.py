"""Published question-answering files as questions with gold paragraphs and distractors, recognised by their content.

    HotpotQA   the official JSON, or the hub's parquet (`memrl.data.sources.hotpotqa`)
    SQuAD      the official JSON of v1.1 and v2.0 (`memrl.data.sources.squad`)
    MuSiQue    JSON lines (`memrl.data.sources.musique`)
    paragraphs a JSON list, or JSON lines, of objects with `title` and `text`: no questions, a pool of distractors

Each may be gzipped. Every mistake names the file, the item and the field.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from memrl.data.paragraphs import Paragraph, Question
from memrl.data.sources import hotpotqa, musique, squad
from memrl.data.sources.items import Item, read_items

_NAMES = {"hotpotqa": "HotpotQA", "squad": "SQuAD", "musique": "MuSiQue", "paragraphs": "plain paragraphs"}
KINDS = ("hotpotqa", "squad", "musique")


@dataclass(frozen=True)
class Source:
    """What a file holds.

    Attributes:
        kind: one of `KINDS`, or "paragraphs".
        questions: those that can be answered, in the file's order.
        paragraphs: all of the file, those of unanswerable questions included; may hold some of them several times.
        num_unanswerable: questions that were left out because the file says that they have no answer.
    """

    kind: str
    questions: list[Question]
    paragraphs: list[Paragraph]
    num_unanswerable: int = 0


def read_source(path: str | os.PathLike[str], kind: str | None = None) -> Source:
    """Read a file of any kind, or of one of `KINDS` alone.

    Raises:
        ValueError: a file that cannot be read, of no known or of another kind, an item that is not as the kind has it, an id that
            two questions share, or, where `kind` is given, no question at all.
    """
    items = read_items(path)
    found = _recognise(items)
    if kind not in (None, found):
        raise ValueError(f"{path}: holds {_NAMES[found]}, but {_NAMES[kind]} is needed")
    if found == "paragraphs":
        return Source(found, [], [Paragraph(item.text("title"), item.text("text")) for item in items])
    source = Source(found, *{"hotpotqa": hotpotqa.read, "squad": squad.read, "musique": musique.read}[found](items))
    ids: set[str] = set()
    for question in source.questions:
        if question.id in ids:
            raise ValueError(f"{path}: the id {question.id!r} occurs twice; ids must be unique")
        ids.add(question.id)
    if kind and not source.questions:
        raise ValueError(f"{path}: none of its {source.num_unanswerable} questions has an answer")
    return source


def read_questions(path: str | os.PathLike[str], kind: str | None = None) -> list[Question]:
    """The questions that can be answered; see `read_source`."""
    return read_source(path, kind).questions


def read_pool(paths: Iterable[str | os.PathLike[str]]) -> list[Paragraph]:
    """All paragraphs of files of any kind."""
    return [paragraph for path in paths for paragraph in read_source(path).paragraphs]


def _recognise(items: list[Item]) -> str:
    first = items[0]
    fields = first.fields.keys()
    if first.is_article:
        return "squad"
    if "paragraphs" in fields:
        return "musique"
    if fields & {"context", "supporting_facts"}:
        return "hotpotqa"
    if {"title", "text"} <= fields:
        return "paragraphs"
    known = "HotpotQA (context, supporting_facts), SQuAD (data), MuSiQue (paragraphs), plain paragraphs (title, text)"
    raise first.error(f"is of no kind that is known by its fields: {known}; it has {', '.join(map(repr, fields)) or 'none'}")
