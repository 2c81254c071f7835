"""HotpotQA as long documents: each question's own paragraphs among as many others as wanted.

A document of N numbered paragraphs holds the question's gold paragraphs (where the answer stands), its own
distractors (paragraphs on similar subjects that come with the question) and paragraphs drawn from all the
other questions, in random order. So a question keeps its difficulty while its document grows from 10
paragraphs to thousands, about 140 tokens each (MemAgent, arXiv 2507.02259, section 4.1).

Everything random about a sample comes from (seed, id of the question) alone: the same command writes the same
bytes, whatever the order of the questions or `limit`, and with the same seed the drawn paragraphs of a
shorter document are among those of a longer one.

DEPARTS from the MemAgent code: that shuffles all samples of one length with one fixed permutation, so the
evidence stands at the same places in training, validation and test; it draws paragraphs from a generator that
concurrent workers advance, so its files cannot be made again.
"""

import gzip
import hashlib
import json
import os
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Paragraph(NamedTuple):
    title: str
    text: str


@dataclass(frozen=True)
class Question:
    """One item of a HotpotQA file.

    Attributes:
        paragraphs: its own, gold and distractors, each once.
        facts: title of each gold paragraph -> the numbers, from 0, of the sentences that support the answer.
        kind: what the file says about it besides (`type`, `level`).
    """

    id: str
    question: str
    answer: str
    paragraphs: tuple[Paragraph, ...]
    facts: dict[str, list[int]]
    kind: dict[str, str]


# --- reading ------------------------------------------------------------------------------------------------


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """The questions of a HotpotQA file in the official layout, JSON or gzipped JSON.

    An item has `_id`, `question`, `answer`, `context` = [[title, [sentence, ...]], ...], and
    `supporting_facts` = [[title, sentence number], ...], which may be flattened to [title, number, ...] or to
    the titles alone.
    """
    questions = [_question(item, f"{path}: item {i}") for i, item in enumerate(_read_list(path))]
    ids: set[str] = set()
    for question in questions:
        if question.id in ids:
            raise ValueError(f"{path}: the _id {question.id!r} occurs twice; ids must be unique")
        ids.add(question.id)
    return questions


def read_pool(path: str | os.PathLike[str]) -> list[Paragraph]:
    """Paragraphs to draw from: of a HotpotQA file, or a JSON list of objects with `title` and `text`."""
    paragraphs: list[Paragraph] = []
    for i, item in enumerate(_read_list(path)):
        where = f"{path}: item {i}"
        if isinstance(item, dict) and "context" in item:
            paragraphs += _paragraphs(item, where)
        else:
            paragraphs.append(Paragraph(_text(item, "title", where), _text(item, "text", where)))
    return paragraphs


def _read_list(path: str | os.PathLike[str]) -> list[Any]:
    try:
        content = Path(path).read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        items = json.loads(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(items, list) or not items:
        raise ValueError(f"{path}: a JSON list with at least one item is needed, as in the official files")
    return items


def _question(item: Any, where: str) -> Question:
    sample_id = _text(item, "_id", where)
    where = f"{where} ({sample_id})"
    paragraphs, facts = tuple(dict.fromkeys(_paragraphs(item, where))), _facts(item, where)
    missing = facts.keys() - {paragraph.title for paragraph in paragraphs}
    if missing:
        # In the "fullwiki" files the retriever may have missed it: such a document does not hold its answer.
        raise ValueError(f"{where}: supporting_facts names {min(missing)!r}, which is not in context")
    return Question(
        id=sample_id,
        question=_text(item, "question", where),
        answer=_text(item, "answer", where),
        paragraphs=paragraphs,
        facts=facts,
        kind={key: item[key] for key in ("type", "level") if isinstance(item.get(key), str)},
    )


def _text(item: Any, key: str, where: str) -> str:
    if not isinstance(item, dict):
        raise ValueError(f"{where}: an object is needed, got {repr(item)[:40]}")
    value = item.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {key}: a text that is not blank is needed, got {repr(value)[:40]}")
    return value


def _paragraphs(item: dict[str, Any], where: str) -> list[Paragraph]:
    allowed = "context: a list of [title, [sentence, ...]] is needed"
    context = item.get("context")
    if not isinstance(context, list) or not context:
        raise ValueError(f"{where}: {allowed}, got {repr(context)[:40]}")
    paragraphs = []
    for entry in context:
        match entry:
            case [str(title), list(sentences)] if all(isinstance(sentence, str) for sentence in sentences):
                # Sentences bring their leading spaces along; where there is none, none belongs there.
                paragraphs.append(Paragraph(title, "".join(sentences).strip()))
            case _:
                raise ValueError(f"{where}: {allowed}, got an entry {repr(entry)[:40]}")
    return paragraphs


def _facts(item: dict[str, Any], where: str) -> dict[str, list[int]]:
    facts: dict[str, list[int]] = {}
    problem = f"{where}: supporting_facts: a list of [title, sentence number] is needed"
    listed = item.get("supporting_facts")
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{problem}, got {repr(listed)[:40]}")
    title = None
    for value in (part for entry in listed for part in (entry if isinstance(entry, list) else [entry])):
        if isinstance(value, str):
            title = value
            facts.setdefault(title, [])
        elif isinstance(value, int) and not isinstance(value, bool) and title is not None:
            facts[title].append(value)
        else:
            raise ValueError(f"{problem}, got {repr(value)[:40]} in it")
    return facts


# --- making samples -----------------------------------------------------------------------------------------


def build_samples(
    questions: Sequence[Question],
    num_documents: int,
    seed: int,
    pool: Iterable[Paragraph] = (),
    limit: int | None = None,
) -> Iterator[dict[str, Any]]:
    """One sample for each question, in order, in the custom format (`memrl.data.custom`).

    Args:
        num_documents: paragraphs in each document. Where a question has more, some of its distractors are
            left out, never a gold paragraph.
        pool: paragraphs to draw from, besides those of all `questions`.
        limit: stop after so many questions; the paragraphs of the others are drawn from all the same.
    """
    own = (paragraph for question in questions for paragraph in question.paragraphs)
    # Sorted, so that it does not matter in which order the files give them.
    candidates = sorted({paragraph for source in (own, pool) for paragraph in source if paragraph.text})
    places: dict[str, list[int]] = {}
    for place, paragraph in enumerate(candidates):
        places.setdefault(paragraph.title, []).append(place)
    for question in questions[:limit]:
        documents = _choose(question, num_documents, seed, candidates, places)
        yield _row(question, documents, seed)


def sample_seed(seed: int, sample_id: str) -> int:
    """A number that depends on (seed, id) alone and differs without pattern from one id to the next.

    Not `hash()`, which Python salts anew in every process.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}\n{sample_id}".encode()).digest()[:8], "big")


def _choose(
    question: Question,
    num_documents: int,
    seed: int,
    candidates: Sequence[Paragraph],
    places: dict[str, list[int]],
) -> list[Paragraph]:
    """The paragraphs of the question's document, in order. `places`: title -> indices of `candidates`."""
    rng = random.Random(sample_seed(seed, question.id))
    gold = sorted(paragraph for paragraph in question.paragraphs if paragraph.title in question.facts)
    near = sorted(paragraph for paragraph in question.paragraphs if paragraph.title not in question.facts)
    # Another version of an own paragraph would be evidence that nobody knows of: its title is never drawn.
    barred = {place for title, _ in question.paragraphs for place in places.get(title, ())}
    wanted = max(0, num_documents - len(question.paragraphs))
    available = len(candidates) - len(barred)
    if num_documents < len(gold):
        raise ValueError(f"{num_documents} documents: question {question.id!r} needs {len(gold)}, all gold")
    if wanted > available:
        own, total = len(question.paragraphs), len(question.paragraphs) + available
        counts = f"has {own} paragraphs of its own and {available} others to draw from, {total} in all"
        raise ValueError(
            f"{num_documents} documents: question {question.id!r} {counts}; ask for fewer or add a pool"
        )
    near = [near[i] for i in _draw(rng, len(near), min(len(near), num_documents - len(gold)))]
    drawn = _draw(rng, len(candidates), min(len(candidates), wanted + len(barred)))
    far = [candidates[place] for place in drawn if place not in barred][:wanted]
    chosen = gold + near + far
    return [chosen[i] for i in _draw(rng, len(chosen), len(chosen))]


def _draw(rng: random.Random, population: int, count: int) -> list[int]:
    """`count` different numbers below `population` in random order; a smaller count gives the start of it.

    The first steps of a Fisher-Yates shuffle. It calls nothing but `random()`, the only method whose numbers
    Python promises to keep from one version to the next.
    """
    moved: dict[int, int] = {}  # what stands at the places that have been exchanged
    drawn = []
    for i in range(count):
        j = i + int(rng.random() * (population - i))
        drawn.append(moved.get(j, j))
        moved[j] = moved.get(i, i)
    return drawn


def _row(question: Question, documents: Sequence[Paragraph], seed: int) -> dict[str, Any]:
    """The sample in the custom format.

    In `evidence`, `document` counts from 1 like the headings; `begin` and `end` are places in the context.
    """
    texts = [f"Document {i}:\n{title}\n{text}" for i, (title, text) in enumerate(documents, start=1)]
    evidence, begin = [], 0
    for number, (document, text) in enumerate(zip(documents, texts, strict=True), start=1):
        if document.title in question.facts:
            sentences = sorted(set(question.facts[document.title]))
            place = {"document": number, "begin": begin, "end": begin + len(text)}
            evidence.append({"title": document.title, "sentences": sentences, **place})
        begin += len(text) + 2
    return {
        "id": question.id,
        "question": question.question,
        "answers": [question.answer],
        **question.kind,
        "num_documents": len(documents),
        "seed": seed,
        "evidence": evidence,
        "context": "\n\n".join(texts),
    }


def write_jsonl(path: str | os.PathLike[str], rows: Iterable[dict[str, Any]]) -> int:
    """Write one JSON object a line and return how many; the file appears complete or not at all."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    count = 0
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count
