"""SQuAD v1.1 and v2.0 (Rajpurkar et al. 2016, 2018; arXiv 1606.05250, 1806.03822): questions on one paragraph of an article.

    {"data": [{"title": "Super_Bowl_50", "paragraphs": [{"context": "...", "qas": [{"id": "56be", "question": "...?",
     "answers": [{"text": "Denver Broncos", "answer_start": 177}, ...], "is_impossible": false}]}]}]}

The other paragraphs of the article are the question's own distractors.
"""

from typing import Any

from memrl.data.paragraphs import Paragraph, Question
from memrl.data.sources.items import Item


def read(items: list[Item]) -> tuple[list[Question], list[Paragraph], int]:
    """The answerable questions, all paragraphs, and how many questions are left out as unanswerable."""
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


def _question(item: Item, gold: Paragraph, near: tuple[Paragraph, ...]) -> Question:
    question_id = item.text("id")
    item = item.named(question_id)
    answers: dict[str, Any] = dict.fromkeys(answer.text("text") for answer in item.objects("answers", "answer"))
    return Question(question_id, item.text("question"), tuple(answers), (gold,), near, {"article": gold.title})
