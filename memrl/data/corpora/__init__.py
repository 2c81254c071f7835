"""Published question-answering files as questions with gold paragraphs and distractors, recognised by their content.

    HotpotQA   the official JSON, or the hub's parquet
    SQuAD      the official JSON of v1.1 and v2.0, or the hub's parquet
    MuSiQue    JSON lines
    paragraphs a JSON list, or JSON lines, of objects with `title` and `text`: no questions, a pool of distractors

Each may be gzipped (`memrl.data.corpora.layouts` shows their fields). Every error message names the file, the item and the field.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from memrl.data.corpora.items import Item, read_items
from memrl.data.corpora.layouts import read_hotpotqa, read_musique, read_squad
from memrl.data.paragraphs import Paragraph, Question

_NAMES = {"hotpotqa": "HotpotQA", "squad": "SQuAD", "musique": "MuSiQue", "paragraphs": "plain paragraphs"}
_READERS = {"hotpotqa": read_hotpotqa, "squad": read_squad, "musique": read_musique}


@dataclass
class Source:
    """The content of one or several files.

    Attributes:
        kind: "hotpotqa", "squad", "musique", or "paragraphs".
        questions: the answerable ones, in the file's order.
        paragraphs: all of the file, those of unanswerable questions included; may hold some of them several times.
        num_unanswerable: number of questions that were left out because the file marks them as unanswerable.
        num_without_gold: number of questions that were left out because a paragraph that the answer follows from is not among
            their own, as in HotpotQA's "fullwiki" files.
    """

    kind: str
    questions: list[Question]
    paragraphs: list[Paragraph]
    num_unanswerable: int = 0
    num_without_gold: int = 0

    @property
    def left_out(self) -> str:
        """What was left out, in words; "" if nothing."""
        parts = [f"{self.num_unanswerable} without an answer"] if self.num_unanswerable else []
        if self.num_without_gold:
            parts.append(f"{self.num_without_gold} whose gold paragraphs are not all in their context")
        return f"{' and '.join(parts)} are left out" if parts else ""


def read_source(path: str | os.PathLike[str], kind: str | None = None) -> Source:
    """Read a file; of any kind, or only of `kind`, "hotpotqa", "squad" or "musique".

    Raises:
        ValueError: a file that cannot be read, of an unknown or of another kind, an item that does not have the kind's layout, an
            id that two questions share, or, if `kind` is given, no question at all.
    """
    items = read_items(path)
    first = next(items)
    found = _recognise(first)
    items = chain([first], items)
    if kind not in (None, found):
        raise ValueError(f"{path}: holds {_NAMES[found]}, but {_NAMES[kind]} is needed")
    if found == "paragraphs":
        return Source(found, [], [Paragraph(item.text("title"), item.text("text")) for item in items])
    source = Source(found, *_READERS[found](items))
    _check_ids(path, source.questions, set())
    if kind and not source.questions:
        raise ValueError(f"{path}: holds no question that can be used: {source.left_out}")
    return source


def source_files(paths: Iterable[Path]) -> list[Path]:
    """The files, with each folder replaced by its .parquet files in the order of their names.

    Raises:
        ValueError: a folder without .parquet files.
    """
    files: list[Path] = []
    for path in paths:
        shards = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not shards:
            raise ValueError(f"{path}: a folder without .parquet files; give files, or a folder of .parquet files")
        files += shards
    return files


def read_sources(paths: Sequence[str | os.PathLike[str]], kind: str) -> Source:
    """Read files of one kind as one, in their order.

    Raises:
        ValueError: as `read_source`, or an id that questions of two files share.
    """
    joined = Source(kind, [], [])
    ids: set[str] = set()
    for path in paths:
        source = read_source(path, kind)
        _check_ids(path, source.questions, ids)
        joined.questions += source.questions
        joined.paragraphs += source.paragraphs
        joined.num_unanswerable += source.num_unanswerable
        joined.num_without_gold += source.num_without_gold
    return joined


def _check_ids(path: str | os.PathLike[str], questions: Iterable[Question], known: set[str]) -> None:
    """Raise ValueError for an id that is known; add the others to `known`."""
    for question in questions:
        if question.id in known:
            raise ValueError(f"{path}: the id {question.id!r} occurs twice; ids must be unique")
        known.add(question.id)


def read_pool(paths: Iterable[str | os.PathLike[str]]) -> list[Paragraph]:
    """All paragraphs of files of any kind."""
    return [paragraph for path in paths for paragraph in read_source(path).paragraphs]


def _recognise(first: Item) -> str:
    fields = first.fields.keys()
    if first.is_article:
        return "squad"
    if "paragraphs" in fields:
        return "musique"
    if "supporting_facts" in fields:
        return "hotpotqa"
    if {"context", "answers"} <= fields:
        return "squad"
    if {"_id", "question", "context"} <= fields:  # HotpotQA's test file
        return "hotpotqa"
    if {"title", "text"} <= fields:
        return "paragraphs"
    known = (
        "HotpotQA (context, supporting_facts), SQuAD (data, or context and answers), MuSiQue (paragraphs), "
        "plain paragraphs (title, text)"
    )
    raise first.error(f"its fields are of no known kind: {known}; it has {', '.join(map(repr, fields)) or 'none'}")
