"""Rows in the layouts of the original MemAgent's files, as rows of the custom format.

    training       {"prompt": [{"role": "user", "content": question}], "context": "...",
                    "reward_model": {"ground_truth": ["..."]}, "extra_info": {"index": 7}}            parquet
    eval_50.json   {"context": "...", "input": question, "answers": ["..."], "num_docs": 50, "index": 7}
    RULER          {"index": 0, "input": question, "context": "...", "outputs": ["..."], "answer_prefix": "...", "length": 8192}

The last two are JSON lists or JSON lines. Above 10,000 documents `context` is a list of numbers: places in the sorted list of all
different paragraphs of the HotpotQA file that the questions come from, which has to be given too.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memrl.data.json_values import describe
from memrl.data.rows import FIELDS

Row = dict[str, Any]


def from_training(row: Row) -> Row:
    """A row of the training data."""
    prompt, reward, info = (row.pop(name, None) for name in ("prompt", "reward_model", "extra_info"))
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    asked = [message.get("content") for message in messages if isinstance(message, dict) and message.get("role") == "user"]
    if len(asked) != 1 or not isinstance(asked[0], str):
        raise ValueError(f"prompt: got {describe(prompt)}; allowed is one message of the user, the question")
    answers = reward.get("ground_truth") if isinstance(reward, dict) else None
    if not isinstance(answers, str | list):
        raise ValueError(
            f"reward_model.ground_truth: got {describe(answers)}; allowed is a text or a list of texts, the gold answers"
        )
    index = info.get("index") if isinstance(info, dict) else None
    fields = {"id": index, "question": asked[0], "answers": answers, "context": row.pop("context", None), "extra_info": info}
    others = {name: value for name, value in row.items() if name not in FIELDS}
    return {**others, **{name: value for name, value in fields.items() if value is not None}}


def is_evaluation(row: Row) -> bool:
    return {"input", "context"} <= row.keys() and "question" not in row and bool({"answers", "outputs"} & row.keys())


def from_evaluation(row: Row, path: Path, paragraphs: Callable[[], Sequence[str]]) -> Row:
    """A row of eval_50.json and its like, or of a RULER file.

    White space around the document is removed, as in the original. RULER's tasks want all outputs, its question answering
    (`qa` in the name of the file or its folder) one of them.

    Args:
        paragraphs: those that a list of numbers in `context` refers to.
    """
    context, answers = row["context"], row.get("outputs", row.get("answers"))
    if isinstance(context, list):
        context = _numbered(context, paragraphs())
    elif isinstance(context, str):
        context = context.strip()
    is_qa = "outputs" not in row or re.search(r"(?<![a-z])qa(?![a-z])", f"{path.absolute().parent.name}/{path.name}".lower())
    others = {name: value for name, value in row.items() if name not in (*FIELDS, "input", "outputs")}
    fields = {"question": row["input"], "answers": answers, "context": context}
    return {**others, **fields, "match": "any" if is_qa or not isinstance(answers, list) or len(answers) == 1 else "all"}


def _numbered(numbers: list[Any], paragraphs: Sequence[str]) -> str:
    """The document of these paragraphs."""
    wrong = [number for number in numbers if type(number) is not int or not 0 <= number < len(paragraphs)]
    if wrong:
        raise ValueError(
            f"context: holds {describe(wrong[0])}; the HotpotQA file has {len(paragraphs)} different paragraphs, counted from 0; "
            "give the file that the numbers were made from"
        )
    texts = [f"Document {place}:\n{paragraphs[number]}" for place, number in enumerate(numbers, start=1)]
    return "\n\n".join(texts)


def hotpotqa_paragraphs(path: str | os.PathLike[str] | None) -> list[str]:
    """All different paragraphs of a HotpotQA file, sorted, as the original numbers them: title, line end, sentences.

    Raises:
        ValueError: no file is given, or it is none of HotpotQA's.
    """
    from memrl.data.corpora.items import read_items

    if path is None:
        raise ValueError("context: holds numbers of paragraphs; give the HotpotQA file that they count in: --hotpotqa FILE")
    found: set[str] = set()
    for item in read_items(path):
        for entry in item.list_of("context"):
            match entry:
                case [str(title), list(sentences)] if all(isinstance(sentence, str) for sentence in sentences):
                    found.add(f"{title}\n{''.join(sentences)}")
                case _:
                    raise item.error("context: a list of [title, [sentence, ...]] is needed, as in HotpotQA's own JSON file")
    return sorted(found)
