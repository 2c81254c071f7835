"""HotpotQA (Yang et al. 2018, arXiv 1809.09600): questions that two paragraphs answer, each with eight similar ones.

    {"_id": "5a8b", "question": "Were both ...?", "answer": "yes", "type": "comparison", "level": "hard",
     "supporting_facts": [["Ed Wood", 0], ...], "context": [["Ed Wood", ["First sentence.", " Second."]], ...]}

`supporting_facts` may be flattened to [title, number, ...] or to the titles alone. On the hub `id` stands in place of `_id`, and
columns in place of pairs: {"title": [...], "sent_id": [...]} and {"title": [...], "sentences": [[...], ...]}.
"""

from collections.abc import Iterable
from typing import Any

from memrl.data.corpora.items import Item
from memrl.data.paragraphs import Paragraph, Question

Facts = dict[str, list[int]]


def read(items: Iterable[Item]) -> tuple[list[Question], list[Paragraph]]:
    """The questions and all their paragraphs."""
    questions = [_question(item) for item in items]
    return questions, [paragraph for question in questions for paragraph in question.gold + question.near]


def _question(item: Item) -> Question:
    sample_id = item.text("id" if "id" in item.fields and "_id" not in item.fields else "_id")
    item = item.named(sample_id)
    paragraphs, facts = dict.fromkeys(_paragraphs(item)), _facts(item)
    missing = facts.keys() - {paragraph.title for paragraph in paragraphs}
    if missing:
        # In the "fullwiki" files the retriever may have missed it: such a document does not hold its answer.
        raise item.error(f"supporting_facts names {min(missing)!r}, which is not in context")
    return Question(
        id=sample_id,
        question=item.text("question"),
        answers=(item.text("answer"),),
        gold=tuple(paragraph for paragraph in paragraphs if paragraph.title in facts),
        near=tuple(paragraph for paragraph in paragraphs if paragraph.title not in facts and paragraph.text),
        metadata={
            **{key: item.fields[key] for key in ("type", "level") if isinstance(item.fields.get(key), str)},
            "supporting_facts": [{"title": title, "sentences": sorted(set(facts[title]))} for title in sorted(facts)],
        },
    )


def _paragraphs(item: Item) -> list[Paragraph]:
    allowed = "a list of [title, [sentence, ...]]"
    context = item.fields.get("context")
    match context:
        case {"title": list(titles), "sentences": list(sentences)} if len(titles) == len(sentences):
            context = [list(pair) for pair in zip(titles, sentences, strict=True)]
    if not isinstance(context, list) or not context:
        raise item.wrong("context", allowed, context)
    paragraphs = []
    for entry in context:
        match entry:
            case [str(title), list(sentences)] if all(isinstance(sentence, str) for sentence in sentences):
                # Sentences bring their leading spaces along; where there is none, none belongs there.
                text = "".join(sentences).strip()
                paragraphs.append(Paragraph(item.checked("context", title), item.checked("context", text)))
            case _:
                raise item.error(f"context: {allowed} is needed, got an entry {repr(entry)[:40]}")
    return paragraphs


def _facts(item: Item) -> Facts:
    """Title of each gold paragraph -> the numbers, from 0, of the sentences that support the answer."""
    allowed = "a list of [title, sentence number]"
    listed: Any = item.fields.get("supporting_facts")
    match listed:
        case {"title": list(titles), "sent_id": list(numbers)} if len(titles) == len(numbers):
            listed = [list(pair) for pair in zip(titles, numbers, strict=True)]
    if not isinstance(listed, list) or not listed:
        raise item.wrong("supporting_facts", allowed, listed)
    facts: Facts = {}
    title = None
    for value in (part for entry in listed for part in (entry if isinstance(entry, list) else [entry])):
        if isinstance(value, str):
            title = value
            facts.setdefault(title, [])
        elif isinstance(value, int) and not isinstance(value, bool) and title is not None:
            facts[title].append(value)
        else:
            raise item.error(f"supporting_facts: {allowed} is needed, got {repr(value)[:40]} in it")
    return facts
