"""The layouts of HotpotQA, SQuAD and MuSiQue: from the items of a file to questions with gold paragraphs and distractors.

HotpotQA (Yang et al. 2018, arXiv 1809.09600): questions that two paragraphs answer, each with eight similar ones.

    {"_id": "5a8b", "question": "Were both ...?", "answer": "yes", "type": "comparison", "level": "hard",
     "supporting_facts": [["Ed Wood", 0], ...], "context": [["Ed Wood", ["First sentence.", " Second."]], ...]}

`supporting_facts` may be flattened to [title, number, ...] or to the titles alone. On the hub `id` replaces `_id`, and columns
replace pairs: {"title": [...], "sent_id": [...]} and {"title": [...], "sentences": [[...], ...]}.

SQuAD v1.1 and v2.0 (Rajpurkar et al. 2016, 2018; arXiv 1606.05250, 1806.03822): questions on one paragraph of an article. The
other paragraphs of the article are the question's own distractors.

    {"data": [{"title": "Super_Bowl_50", "paragraphs": [{"context": "...", "qas": [{"id": "56be", "question": "...?",
     "answers": [{"text": "Denver Broncos", "answer_start": 177}, ...], "is_impossible": false}]}]}]}

On the hub each question is a row; rows of one title make an article. Where v2.0 has no answer, `text` is empty:

    {"id": "56be", "title": "Super_Bowl_50", "context": "...", "question": "...?",
     "answers": {"text": ["Denver Broncos", ...], "answer_start": [177, ...]}}

MuSiQue (Trivedi et al. 2022, arXiv 2108.00573): questions that two to four paragraphs answer, among twenty. JSON lines. The full
version has each question twice with one id, once without the paragraphs that answer it.

    {"id": "2hop__1_2", "question": "...?", "answer": "...", "answer_aliases": ["..."], "answerable": true,
     "paragraphs": [{"idx": 0, "title": "...", "paragraph_text": "...", "is_supporting": false}, ...]}
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any

from memrl.data.corpora.items import Item
from memrl.data.paragraphs import Paragraph, Question

# The answerable questions, all paragraphs, and the numbers of questions that are left out: the unanswerable ones, and those whose
# gold paragraphs are not all in the file (HotpotQA only).
Content = tuple[list[Question], list[Paragraph], int, int]


# --- HotpotQA -----------------------------------------------------------------------------------------------


def read_hotpotqa(items: Iterable[Item]) -> Content:
    """As above, and the number of questions without all their gold paragraphs: in the "fullwiki" files the retriever missed some,
    so a document made of `context` would not hold the answer. The test files have neither answers nor `supporting_facts`."""
    questions: list[Question] = []
    paragraphs: list[Paragraph] = []
    num_unanswerable = num_without_gold = 0
    for item in items:
        sample_id = item.text("id" if "id" in item.fields and "_id" not in item.fields else "_id")
        item = item.named(sample_id)
        own = list(dict.fromkeys(_hotpotqa_paragraphs(item)))
        paragraphs += own
        if item.fields.get("answer") is None and item.fields.get("supporting_facts") is None:
            num_unanswerable += 1
        elif (facts := _hotpotqa_facts(item)).keys() <= {paragraph.title for paragraph in own}:
            questions.append(_hotpotqa_question(item, sample_id, own, facts))
        else:
            num_without_gold += 1
    return questions, paragraphs, num_unanswerable, num_without_gold


def _hotpotqa_question(item: Item, sample_id: str, paragraphs: list[Paragraph], facts: dict[str, list[int]]) -> Question:
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


def _pairs(item: Item, field: str, column: str, allowed: str) -> list[Any]:
    """A field that must hold a list; the hub's columns `title` and `column` become a list of pairs."""
    listed = item.fields.get(field)
    match listed:
        case {"title": list(titles), **columns} if isinstance(values := columns.get(column), list) and len(titles) == len(values):
            return [list(pair) for pair in zip(titles, values, strict=True)]
        case list() if listed:
            return listed
    raise item.wrong(field, allowed)


def _hotpotqa_paragraphs(item: Item) -> list[Paragraph]:
    allowed = "a list of [title, [sentence, ...]]"
    paragraphs = []
    for entry in _pairs(item, "context", "sentences", allowed):
        match entry:
            case [str(title), list(sentences)] if all(isinstance(sentence, str) for sentence in sentences):
                text = "".join(sentences).strip()  # sentences begin with the spaces that belong before them
                paragraphs.append(Paragraph(item.checked("context", title), item.checked("context", text)))
            case _:
                raise item.error(f"context: {allowed} is needed, got an entry {repr(entry)[:40]}")
    return paragraphs


def _hotpotqa_facts(item: Item) -> dict[str, list[int]]:
    """Title of each gold paragraph -> the numbers, from 0, of the sentences that support the answer."""
    allowed = "a list of [title, sentence number]"
    listed = _pairs(item, "supporting_facts", "sent_id", allowed)
    facts: dict[str, list[int]] = {}
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


# --- SQuAD --------------------------------------------------------------------------------------------------


def read_squad(items: Iterable[Item]) -> Content:
    items = iter(items)
    first = next(items)
    return (_squad_articles if first.is_article else _squad_rows)(chain([first], items))


def _squad_articles(items: Iterable[Item]) -> Content:
    questions: list[Question] = []
    paragraphs: list[Paragraph] = []
    num_unanswerable = 0
    for item in items:
        title = item.text("title")
        entries = item.named(title).objects("paragraphs", "paragraph")
        own = [Paragraph(title.replace("_", " "), entry.text("context")) for entry in entries]
        paragraphs += own
        for entry, gold in zip(entries, own, strict=True):
            # One tuple for all questions of a paragraph: a large file has some ten for each.
            near = tuple(dict.fromkeys(paragraph for paragraph in own if paragraph != gold))
            # v2.0 has paragraphs without questions.
            asked = entry.objects("qas", "question") if entry.fields.get("qas") != [] else []
            answerable = [question for question in asked if question.fields.get("is_impossible") is not True]
            num_unanswerable += len(asked) - len(answerable)
            questions += [_squad_question(question, gold, near) for question in answerable]
    return questions, paragraphs, num_unanswerable, 0


def _squad_question(item: Item, gold: Paragraph, near: tuple[Paragraph, ...]) -> Question:
    question_id = item.text("id")
    item = item.named(question_id)
    answers = tuple(dict.fromkeys(answer.text("text") for answer in item.objects("answers", "answer")))
    return Question(question_id, item.text("question"), answers, (gold,), near, {"article": gold.title})


def _squad_rows(items: Iterable[Item]) -> Content:
    rows: list[tuple[str, str, tuple[str, ...], Paragraph]] = []
    articles: dict[str, dict[Paragraph, Paragraph]] = {}
    num_unanswerable = 0
    for item in items:
        question_id = item.text("id")
        item = item.named(question_id)
        paragraph = Paragraph(item.text("title").replace("_", " "), item.text("context"))
        # The first of equal paragraphs replaces the others: each row brings its own copy of the text.
        paragraph = articles.setdefault(paragraph.title, {}).setdefault(paragraph, paragraph)
        answers = _squad_row_answers(item)
        num_unanswerable += not answers
        if answers:
            rows.append((question_id, item.text("question"), answers, paragraph))
    near = {
        gold: tuple(paragraph for paragraph in article if paragraph != gold) for article in articles.values() for gold in article
    }
    questions = [
        Question(name, question, answers, (gold,), near[gold], {"article": gold.title}) for name, question, answers, gold in rows
    ]
    return questions, list(near), num_unanswerable, 0


def _squad_row_answers(item: Item) -> tuple[str, ...]:
    match item.fields.get("answers"):
        case {"text": list(texts)} if all(isinstance(text, str) and text.strip() for text in texts):
            return tuple(dict.fromkeys(item.checked("answers", text) for text in texts))
    raise item.wrong("answers", "an object whose text is a list of texts that are not blank")


# --- MuSiQue ------------------------------------------------------------------------------------------------


def read_musique(items: Iterable[Item]) -> Content:
    questions: list[Question] = []
    paragraphs: list[Paragraph] = []
    num_unanswerable = 0
    for item in items:
        item = item.named(item.text("id"))
        supporting = _musique_paragraphs(item)
        paragraphs += supporting
        answerable = item.fields.get("answerable", True)
        if not isinstance(answerable, bool):
            raise item.wrong("answerable", "true or false")
        if answerable:
            questions.append(_musique_question(item, supporting))
        num_unanswerable += not answerable
    return questions, paragraphs, num_unanswerable, 0


def _musique_paragraphs(item: Item) -> dict[Paragraph, bool]:
    """Each paragraph once, and whether it supports the answer."""
    supporting: dict[Paragraph, bool] = {}
    for entry in item.objects("paragraphs", "paragraph"):
        paragraph = Paragraph(entry.text("title"), entry.text("paragraph_text"))
        if not isinstance(supports := entry.fields.get("is_supporting"), bool):
            raise entry.wrong("is_supporting", "true or false")
        supporting[paragraph] = supporting.get(paragraph, False) or supports
    return supporting


def _musique_question(item: Item, supporting: dict[Paragraph, bool]) -> Question:
    gold = tuple(paragraph for paragraph, supports in supporting.items() if supports)
    if not gold:
        raise item.error("paragraphs: none of them has is_supporting true, so the document would not hold the answer")
    aliases = item.fields.get("answer_aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise item.wrong("answer_aliases", "a list of texts")
    answers = dict.fromkeys((item.text("answer"), *(item.checked("answer_aliases", alias) for alias in aliases if alias.strip())))
    near = tuple(paragraph for paragraph, supports in supporting.items() if not supports)
    return Question(item.text("id"), item.text("question"), tuple(answers), gold, near)
