"""MuSiQue (Trivedi et al. 2022, arXiv 2108.00573): questions that two to four paragraphs answer, among twenty. JSON lines.

    {"id": "2hop__1_2", "question": "...?", "answer": "...", "answer_aliases": ["..."], "answerable": true,
     "paragraphs": [{"idx": 0, "title": "...", "paragraph_text": "...", "is_supporting": false}, ...]}

The full version has each question twice under one id, once without what answers it.
"""

from collections.abc import Iterable

from memrl.data.corpora.items import Item
from memrl.data.paragraphs import Paragraph, Question


def read(items: Iterable[Item]) -> tuple[list[Question], list[Paragraph], int]:
    """The answerable questions, all paragraphs, and how many questions are left out as unanswerable."""
    questions: list[Question] = []
    paragraphs: list[Paragraph] = []
    num_unanswerable = 0
    for item in items:
        named = item.named(item.text("id"))
        supporting = _paragraphs(named)
        paragraphs += supporting
        answerable = named.fields.get("answerable", True)
        if not isinstance(answerable, bool):
            raise named.wrong("answerable", "true or false", answerable)
        if answerable:
            questions.append(_question(named, supporting))
        num_unanswerable += not answerable
    return questions, paragraphs, num_unanswerable


def _paragraphs(item: Item) -> dict[Paragraph, bool]:
    """Each paragraph once, and whether it supports the answer."""
    supporting: dict[Paragraph, bool] = {}
    for entry in item.objects("paragraphs", "paragraph"):
        paragraph = Paragraph(entry.text("title"), entry.text("paragraph_text"))
        supports = entry.fields.get("is_supporting")
        if not isinstance(supports, bool):
            raise entry.wrong("is_supporting", "true or false", supports)
        supporting[paragraph] = supporting.get(paragraph, False) or supports
    return supporting


def _question(item: Item, supporting: dict[Paragraph, bool]) -> Question:
    gold = tuple(paragraph for paragraph, supports in supporting.items() if supports)
    if not gold:
        raise item.error("paragraphs: none of them has is_supporting true, so the document would not hold the answer")
    aliases = item.fields.get("answer_aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise item.wrong("answer_aliases", "a list of texts", aliases)
    answers = dict.fromkeys((item.text("answer"), *(item.checked("answer_aliases", alias) for alias in aliases if alias.strip())))
    near = tuple(paragraph for paragraph, supports in supporting.items() if not supports)
    return Question(item.text("id"), item.text("question"), tuple(answers), gold, near)
