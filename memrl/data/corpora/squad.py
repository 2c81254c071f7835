"""SQuAD v1.1 and v2.0 (Rajpurkar et al. 2016, 2018; arXiv 1606.05250, 1806.03822): questions on one paragraph of an article.

    {"data": [{"title": "Super_Bowl_50", "paragraphs": [{"context": "...", "qas": [{"id": "56be", "question": "...?",
     "answers": [{"text": "Denver Broncos", "answer_start": 177}, ...], "is_impossible": false}]}]}]}

The other paragraphs of the article are the question's own distractors. On the hub each question is a row of its own:

    {"id": "56be", "title": "Super_Bowl_50", "context": "...", "question": "...?",
     "answers": {"text": ["Denver Broncos", ...], "answer_start": [177, ...]}}

Rows of one title make an article; where v2.0 has no answer, `text` is empty.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any

from memrl.data.corpora.items import Item
from memrl.data.paragraphs import Paragraph, Question


def read(items: Iterable[Item]) -> tuple[list[Question], list[Paragraph], int]:
    """The answerable questions, all paragraphs, and how many questions are left out as unanswerable."""
    items = iter(items)
    first = next(items)
    return (_read_articles if first.is_article else _read_rows)(chain([first], items))


def _read_articles(items: Iterable[Item]) -> tuple[list[Question], list[Paragraph], int]:
    questions: list[Question] = []
    paragraphs: list[Paragraph] = []
    num_unanswerable = 0
    for item in items:
        title = item.text("title")
        article = item.named(title)
        entries = article.objects("paragraphs", "paragraph")
        own = [Paragraph(title.replace("_", " "), entry.text("context")) for entry in entries]
        paragraphs += own
        for entry, gold in zip(entries, own, strict=True):
            # One tuple for all questions of a paragraph: a large file has some ten for each.
            near = tuple(dict.fromkeys(paragraph for paragraph in own if paragraph != gold))
            # v2.0 has paragraphs that nothing is asked about.
            asked = entry.objects("qas", "question") if entry.fields.get("qas") != [] else []
            answerable = [question for question in asked if question.fields.get("is_impossible") is not True]
            num_unanswerable += len(asked) - len(answerable)
            questions += [_question(question, gold, near) for question in answerable]
    return questions, paragraphs, num_unanswerable


def _read_rows(items: Iterable[Item]) -> tuple[list[Question], list[Paragraph], int]:
    rows: list[tuple[str, str, tuple[str, ...], Paragraph]] = []
    articles: dict[str, dict[Paragraph, Paragraph]] = {}
    num_unanswerable = 0
    for item in items:
        named = item.named(item.text("id"))
        paragraph = Paragraph(named.text("title").replace("_", " "), named.text("context"))
        # The first of equal paragraphs stands for all: a row brings its own copy of the text.
        paragraph = articles.setdefault(paragraph.title, {}).setdefault(paragraph, paragraph)
        answers = _row_answers(named)
        num_unanswerable += not answers
        if answers:
            rows.append((item.text("id"), named.text("question"), answers, paragraph))
    near = {
        gold: tuple(paragraph for paragraph in article if paragraph != gold) for article in articles.values() for gold in article
    }
    questions = [
        Question(name, question, answers, (gold,), near[gold], {"article": gold.title}) for name, question, answers, gold in rows
    ]
    return questions, list(near), num_unanswerable


def _row_answers(item: Item) -> tuple[str, ...]:
    match item.fields.get("answers"):
        case {"text": list(texts)} if all(isinstance(text, str) and text.strip() for text in texts):
            return tuple(dict.fromkeys(item.checked("answers", text) for text in texts))
    raise item.wrong("answers", "an object whose text is a list of texts that are not blank", item.fields.get("answers"))


def _question(item: Item, gold: Paragraph, near: tuple[Paragraph, ...]) -> Question:
    question_id = item.text("id")
    item = item.named(question_id)
    answers: dict[str, Any] = dict.fromkeys(answer.text("text") for answer in item.objects("answers", "answer"))
    return Question(question_id, item.text("question"), tuple(answers), (gold,), near, {"article": gold.title})
