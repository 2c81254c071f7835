"""The original's evaluation files are read as tasks: eval_50.json with texts, eval_12800.json with numbers, and RULER's files."""

import json

import pytest

from memrl.agents import AgentConfig
from memrl.data import load_samples
from memrl.data.needle import build_tokenizer
from memrl.data.ruler import RulerFiles
from memrl.evaluation.tasks import make_tasks
from memrl.prompts import load_prompts
from memrl.tokenizer import Tokenizer
from tests.test_sources import hotpot_item

TEXTS = [
    {
        "context": "\n Document 1:\nEd\nEd did. \n\n",
        "input": " Who did? ",
        "answers": ["Ed", "Edward"],
        "num_docs": 50,
        "index": 7,
    },
    {"context": "Document 1:\nAl\nAl \u2013 caf\u00e9.", "input": "Who?", "answers": ["Al"], "num_docs": 50, "index": 9},
]
RULER = {"index": 0, "input": "Which?", "context": "x is 1", "outputs": ["AAAAA", "BBBBB"], "answer_prefix": " A", "length": 8192}


@pytest.fixture
def task_of():
    """task_of(path, **files): the task that `eval.py --task PATH` runs."""
    tokenizer, agent = Tokenizer(build_tokenizer()), AgentConfig(load_prompts("question_first"))
    return lambda path, **files: make_tasks([str(path)], tokenizer, agent, RulerFiles(**files))[0]


def test_a_file_of_texts_is_a_task_with_its_own_questions(tmp_path, task_of):
    for options in ({}, {"ensure_ascii": False, "indent": 4}):
        path = tmp_path / "eval_50.json"
        path.write_text(json.dumps(TEXTS, **options))
        task = task_of(path)
        assert (task.name, task.count("file", None)) == ("eval_50", 2)
        one, other = (task.sample("file", index, 0) for index in (0, 1))
        assert (one.question, one.context, one.answers, one.match) == (
            " Who did? ",
            TEXTS[0]["context"].strip(),
            ("Ed", "Edward"),
            "any",
        )
        assert (other.id, other.context) == ("eval_50.json:2", TEXTS[1]["context"])
        assert one.metadata == {"num_docs": 50, "index": 7}


def test_numbers_of_documents_become_the_paragraphs_of_hotpotqa(tmp_path, task_of):
    items = [hotpot_item(0), hotpot_item(1), hotpot_item(0)]
    source, path = tmp_path / "hotpot_dev_distractor_v1.json", tmp_path / "eval_12800.json"
    source.write_text(json.dumps([{**item, "_id": f"q{number}"} for number, item in enumerate(items)]))
    path.write_text(json.dumps([{**TEXTS[0], "context": [7, 0], "num_docs": 2}]))
    task = task_of(path, hotpotqa=str(source))
    texts = [f"T{i}.{j}\nFirst of {i}.{j}. Second of {i}.{j}." for i in range(2) for j in range(4)]  # sorted, each once
    assert task.sample("file", 0, 0).context == f"Document 1:\n{texts[7]}\n\nDocument 2:\n{texts[0]}"
    before = task.version
    items[0]["context"][0][1][0] = "Else."
    source.write_text(json.dumps(items[:2]))
    assert task_of(path, hotpotqa=str(source)).version != before, "the paragraphs belong to the task"
    with pytest.raises(ValueError, match=r"item 1: context: holds numbers of paragraphs.*--hotpotqa FILE"):
        task_of(path)
    for wrong in (8, -1, True, "1"):
        path.write_text(json.dumps([{**TEXTS[0], "context": [0, wrong]}]))
        with pytest.raises(ValueError, match=r"item 1: context: holds .*; the HotpotQA file has 8 different paragraphs"):
            task_of(path, hotpotqa=str(source))


@pytest.mark.parametrize(
    ("name", "outputs", "match"),
    [
        ("vt_8192.json", ["AAAAA", "BBBBB"], "all"),
        ("niah_single_1/validation.jsonl", ["17"], "any"),
        ("niah_multiquery/validation.jsonl", ["17", "18"], "all"),
        ("qa_1_8192.jsonl", ["Ed", "Edward"], "any"),
        ("qa_2/validation.jsonl", ["Ed", "Edward"], "any"),
    ],
)
def test_rulers_files_want_all_outputs_or_for_questions_any(tmp_path, task_of, name, outputs, match):
    rows = [{**RULER, "outputs": outputs}, {**RULER, "outputs": outputs}]  # the index of a row can repeat
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows))
    sample = task_of(path).sample("file", 1, 0)
    assert (sample.question, sample.context, sample.answers, sample.match) == ("Which?", "x is 1", tuple(outputs), match)
    assert sample.metadata["length"] == 8192


def test_mistakes_in_them_are_named(tmp_path):
    path = tmp_path / "eval_50.json"
    for change, words in (({"input": ""}, "question"), ({"answers": []}, "answers"), ({"context": 3}, "context")):
        path.write_text(json.dumps([TEXTS[0], {**TEXTS[0], **change}]))
        with pytest.raises(ValueError, match=rf"eval_50\.json: item 2: {words}"):
            load_samples(path)
