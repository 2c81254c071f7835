"""HotpotQA as long documents, and the command that writes them."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memrl.data.custom import load_jsonl
from memrl.data.hotpotqa import Paragraph, build_samples, read_pool, read_questions, sample_seed, write_jsonl

ROOT = Path(__file__).resolve().parents[1]


def make_item(number: int, num_own: int = 4) -> dict:
    """A made-up question with two gold paragraphs and some distractors."""
    names = [f"{number}.{i}" for i in range(num_own)]
    context = [[f"T{name}", [f"First of {name}.", f" Second of {name}."]] for name in names]
    facts = [[f"T{number}.1", 1], [f"T{number}.0", 0]]
    texts = {"_id": f"q{number}", "question": f"Question {number}?", "answer": f"Answer {number}"}
    return {**texts, "type": "bridge", "level": "hard", "supporting_facts": facts, "context": context}


@pytest.fixture
def write_items(tmp_path):
    def write_items(items, name="hotpot.json.gz") -> Path:
        content = json.dumps(items).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return tmp_path / name

    return write_items


@pytest.fixture
def questions(write_items):
    return read_questions(write_items([make_item(i) for i in range(30)]))


def titles(row) -> list[str]:
    return [document.split("\n")[1] for document in row["context"].split("\n\n")]


def test_build_samples_document_holds_own_paragraphs_and_others(questions):
    for number, row in enumerate(build_samples(questions, 20, seed=0)):
        assert (row["id"], row["question"]) == (f"q{number}", f"Question {number}?")
        assert (row["answers"], row["type"], row["level"]) == ([f"Answer {number}"], "bridge", "hard")
        found = titles(row)
        assert len(found) == len(set(found)) == row["num_documents"] == 20
        assert {f"T{number}.{i}" for i in range(4)} <= set(found)
        for i, document in enumerate(row["context"].split("\n\n"), start=1):
            title = found[i - 1]
            assert document == f"Document {i}:\n{title}\nFirst of {title[1:]}. Second of {title[1:]}."


def test_build_samples_evidence_says_where_the_gold_paragraphs_stand(questions):
    for number, row in enumerate(build_samples(questions, 20, seed=0)):
        facts = {fact["title"]: fact["sentences"] for fact in row["evidence"]}
        assert facts == {f"T{number}.0": [0], f"T{number}.1": [1]}
        for fact in row["evidence"]:
            text = row["context"][fact["begin"] : fact["end"]]
            assert text.startswith(f"Document {fact['document']}:\n{fact['title']}\n")
            assert text.endswith(f"Second of {fact['title'][1:]}.")


def test_build_samples_evidence_positions_differ_between_samples(questions):
    # The released data has one permutation for all samples of a length: a model can learn where to look.
    rows = build_samples(questions, 20, seed=0)
    positions = [tuple(fact["document"] for fact in row["evidence"]) for row in rows]
    assert len(set(positions)) > 20
    everywhere = {place for pair in positions for place in pair}
    assert min(everywhere) <= 2
    assert max(everywhere) >= 19


def test_build_samples_distractors_differ_between_samples_and_seeds(questions):
    def drawn(seed):
        return [frozenset(titles(row)) for row in build_samples(questions, 20, seed)]

    assert len(set(drawn(0))) == 30
    assert all(a != b for a, b in zip(drawn(0), drawn(1), strict=True))


def test_build_samples_does_not_depend_on_limit_or_order(questions):
    rows = list(build_samples(questions, 20, seed=3))
    assert list(build_samples(questions, 20, seed=3, limit=4)) == rows[:4]
    assert list(build_samples(questions[::-1], 20, seed=3))[::-1] == rows


def test_build_samples_does_not_depend_on_the_order_of_paragraphs(questions, write_items):
    items = [make_item(i) for i in range(30)]
    turned = read_questions(write_items([{**item, "context": item["context"][::-1]} for item in items]))
    for count in (3, 20):
        assert list(build_samples(turned, count, seed=0)) == list(build_samples(questions, count, seed=0))


def test_build_samples_longer_document_holds_the_shorter_one(questions):
    for short, long in zip(build_samples(questions, 20, 0), build_samples(questions, 50, 0), strict=True):
        assert set(titles(short)) < set(titles(long))
        assert titles(short) != [title for title in titles(long) if title in titles(short)]


def test_build_samples_fewer_documents_than_own_keep_the_gold(questions):
    rows = list(build_samples(questions, 3, seed=0))
    assert all(len(titles(row)) == 3 and len(row["evidence"]) == 2 for row in rows)
    left = {title.split(".")[1] for row in rows for title in titles(row)}
    assert left == {"0", "1", "2", "3"}


def test_build_samples_all_paragraphs_can_be_asked_for_but_not_one_more(questions):
    assert all(len(set(titles(row))) == 120 for row in build_samples(questions, 120, seed=0))
    with pytest.raises(ValueError, match=r"121 documents: .*'q0' has 4 .* and 116 others.* 120 in all"):
        list(build_samples(questions, 121, seed=0))
    with pytest.raises(ValueError, match=r"1 documents: question 'q0' needs 2"):
        list(build_samples(questions, 1, seed=0))


def test_build_samples_pool_is_deduplicated_and_never_repeats_an_own_title(questions):
    own = questions[0].paragraphs[0]
    pool = [own, Paragraph(own.title, "another version of it"), Paragraph("New", "x"), Paragraph("New", "x")]
    pool += [Paragraph("New", "y"), Paragraph("Blank", "")]
    rows = list(build_samples(questions[:1], 6, 0, pool))
    assert sorted(titles(rows[0])) == ["New", "New", "T0.0", "T0.1", "T0.2", "T0.3"]
    with pytest.raises(ValueError, match=r"4 .* and 2 others"):
        list(build_samples(questions[:1], 7, 0, pool))


def test_build_samples_paragraph_of_two_questions_stands_once(write_items):
    items = [make_item(0), make_item(1)]
    items[1]["context"].append(items[0]["context"][2])
    items[0]["context"].append(items[0]["context"][3])  # twice in one question
    rows = list(build_samples(read_questions(write_items(items)), 8, seed=0))
    assert all(len(set(titles(row))) == 8 for row in rows)


def test_sample_seed_is_the_same_in_every_process_and_python():
    assert sample_seed(0, "q0") == 0x4d0ac3d4f0c655a1
    assert len({sample_seed(seed, name) for seed in range(5) for name in ("q0", "q1", "1\nq0")}) == 15


def test_read_questions_accepts_flattened_facts(write_items):
    forms = [[["T0.1", 1], ["T0.0", 0]], ["T0.1", 1, "T0.0", 0]]
    for i, facts in enumerate(forms):
        path = write_items([{**make_item(0), "supporting_facts": facts}], name=f"{i}.json")
        assert read_questions(path)[0].facts == {"T0.1": [1], "T0.0": [0]}
    path = write_items([{**make_item(0), "supporting_facts": ["T0.1", "T0.0"]}], name="titles.json")
    assert read_questions(path)[0].facts == {"T0.1": [], "T0.0": []}


def test_read_pool_takes_questions_and_plain_paragraphs(write_items):
    assert read_pool(write_items([{"title": "A", "text": "a"}])) == [("A", "a")]
    assert len(read_pool(write_items([make_item(0), make_item(1)]))) == 8


BAD_ITEMS = {
    # name: (fields to replace, what the message must name)
    "no id": ({"_id": None}, ["item 1", "_id"]),
    "id twice": ({"_id": "q0"}, ["_id", "q0", "twice"]),
    "no answer": ({"answer": None}, ["item 1 (q1)", "answer"]),
    "question blank": ({"question": " "}, ["item 1 (q1)", "question"]),
    "no context": ({"context": []}, ["q1", "context: a list", "[]"]),
    "context of texts": ({"context": ["T1.0", "T1.1"]}, ["q1", "context", "T1.0"]),
    "sentences not texts": ({"context": [["T1.0", [1]]]}, ["q1", "context"]),
    "no facts": ({"supporting_facts": []}, ["q1", "supporting_facts: a list", "[]"]),
    "facts begin with a number": ({"supporting_facts": [0, "T1.0"]}, ["q1", "supporting_facts"]),
    "facts of truth values": ({"supporting_facts": ["T1.0", True]}, ["q1", "supporting_facts"]),
    "gold not in context": ({"supporting_facts": [["Elsewhere", 0]]}, ["q1", "Elsewhere", "context"]),
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_read_questions_bad_item_is_named(write_items, name):
    change, words = BAD_ITEMS[name]
    path = write_items([make_item(0), {**make_item(1), **change}])
    with pytest.raises(ValueError) as caught:
        read_questions(path)
    assert all(word in str(caught.value) for word in (str(path), *words)), caught.value


def test_write_jsonl_failure_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("old")

    def rows():
        yield {"a": 1}
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError):
        write_jsonl(path, rows())
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.jsonl"]
    assert write_jsonl(path, [{"a": "\u00e9\u2028"}]) == 1
    assert path.read_bytes() == '{"a": "\u00e9\u2028"}\n'.encode()
    assert os.listdir(tmp_path) == ["out.jsonl"]


# --- the command --------------------------------------------------------------------------------------------


def command(*arguments, **environment) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "memrl.data", *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def test_command_writes_the_same_bytes_every_time_and_they_load(write_items, tmp_path):
    source, out = write_items([make_item(i) for i in range(30)]), [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    for path, salt in zip(out, "12", strict=True):
        done = command("hotpotqa", source, "--out", path, "--documents", 20, "--seed", 5, PYTHONHASHSEED=salt)
        assert (done.returncode, done.stderr) == (0, "")
    assert out[0].read_bytes() == out[1].read_bytes()
    samples = load_jsonl(out[0])
    assert [sample.id for sample in samples] == [f"q{i}" for i in range(30)]
    assert list(samples[3].metadata) == ["type", "level", "num_documents", "seed", "evidence"]
    assert samples[3].metadata["seed"] == 5


def test_command_limit_and_pool(write_items, tmp_path):
    source, out = write_items([make_item(i) for i in range(3)]), tmp_path / "out.jsonl"
    lists = {name: [{"title": f"{name}{i}", "text": "x"} for i in range(9)] for name in "ab"}
    pools = [write_items(items, name=f"{name}.json") for name, items in lists.items()]
    done = command("hotpotqa", source, "--out", out, "--documents", 30, "--limit", 2, "--pool", *pools)
    assert (done.returncode, done.stderr) == (0, "")
    assert [len(titles(json.loads(line))) for line in out.read_text().splitlines()] == [30, 30]


def test_command_mistakes_are_one_line_and_exit_code_2(write_items, tmp_path):
    good, out = write_items([make_item(0)]), tmp_path / "out.jsonl"
    cut, bad = tmp_path / "cut.json.gz", tmp_path / "bad.json"
    cut.write_bytes(good.read_bytes()[:40])
    bad.write_text("[1, ")
    mistakes = {
        "COMMAND": [],
        "hotpot_qa": ["hotpot_qa"],
        "--documents": ["hotpotqa", good, "--out", out],
        "'0'": ["hotpotqa", good, "--out", out, "--documents", "0"],
        "9 documents": ["hotpotqa", good, "--out", out, "--documents", "9"],
        "none.json": ["hotpotqa", tmp_path / "none.json", "--out", out, "--documents", "4"],
        "cut.json.gz: cannot be read": ["hotpotqa", cut, "--out", out, "--documents", "4"],
        "bad.json: not JSON": ["hotpotqa", bad, "--out", out, "--documents", "4"],
        "no folder": ["hotpotqa", good, "--out", tmp_path / "none" / "o.jsonl", "--documents", "4"],
        "input file too": ["hotpotqa", good, "--out", good, "--documents", "4"],
    }
    for words, arguments in mistakes.items():
        done = command(*arguments)
        assert done.returncode == 2, arguments
        assert words in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert not out.exists()


def test_command_help_is_quick():
    start = time.monotonic()
    done = command("hotpotqa", "--help")
    assert time.monotonic() - start < 2
    assert done.returncode == 0
    assert "--documents" in done.stdout


@pytest.mark.parametrize(
    ("name", "count", "documents"),
    [("hotpot_train.subset.json.gz", 200, 50), ("hotpot_dev_distractor.subset100.json.gz", 100, 200)],
)
def test_real_hotpotqa_files_become_samples(shared_data, tmp_path, name, count, documents):
    path = shared_data / "hotpotqa" / name
    if not path.is_file():
        pytest.skip(f"the public HotpotQA file {name} is not there")
    out = tmp_path / "out.jsonl"
    questions = read_questions(path)
    assert write_jsonl(out, build_samples(questions, documents, seed=0)) == count
    positions = set()
    for sample, question in zip(load_jsonl(out), questions, strict=True):
        assert (sample.id, sample.question) == (question.id, question.question)
        assert sample.answers == (question.answer,)
        assert sample.context.count("\n\nDocument ") == documents - 1
        assert len(sample.metadata["evidence"]) == 2
        by_title = {paragraph.title: paragraph.text for paragraph in question.paragraphs}
        for fact in sample.metadata["evidence"]:
            text = sample.context[fact["begin"] : fact["end"]]
            assert text == f"Document {fact['document']}:\n{fact['title']}\n{by_title[fact['title']]}"
        positions.add(tuple(fact["document"] for fact in sample.metadata["evidence"]))
    assert len(positions) > 0.9 * count
