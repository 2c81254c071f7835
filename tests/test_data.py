"""The custom data format: what it reads, what it refuses and in which words."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from memrl.data import custom, json_values, load_samples
from memrl.data.custom import JsonlSamples as load_jsonl

ROOT = Path(__file__).resolve().parents[1]
GOOD = {"question": "Who?", "context": "Ed did.", "answers": ["Ed"]}


@pytest.fixture
def write(tmp_path):
    """write(line, ..., name=...): a file of these lines, objects as JSON, bytes as they are."""

    def write(*lines, name="data.jsonl") -> Path:
        path = tmp_path / name
        encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path.write_bytes(b"".join(line + b"\n" for line in encoded))
        return path

    return write


def test_load_jsonl_reads_every_field(write):
    row = {**GOOD, "id": "q1", "answers": ["Ed", "Edward"], "source": "notes", "evidence": [{"begin": 0}]}
    (sample,) = load_jsonl(write(row))
    assert (sample.id, sample.question, sample.context) == ("q1", "Who?", "Ed did.")
    assert sample.answers == ("Ed", "Edward")
    assert sample.metadata == {"source": "notes", "evidence": [{"begin": 0}]}


def test_load_jsonl_places_of_evidence_are_taken_as_they_are(write):
    rows = [
        {**GOOD, "depths": [0, 0.25, 1]},
        {**GOOD, "evidence": [{"title": "a", "begin": 0, "end": None}, {}]},
        {**GOOD, "depths": []},
    ]
    assert [sample.metadata for sample in load_jsonl(write(*rows))] == [
        {key: value for key, value in row.items() if key in ("depths", "evidence")} for row in rows
    ]


def test_load_jsonl_keeps_ids_questions_and_files_at_hand(write, tmp_path):
    (tmp_path / "a.txt").write_text("one")
    path = write({**GOOD, "id": "q1"}, {"question": "When?", "answers": "Ed", "file": "a.txt"})
    samples = load_samples(path)
    assert samples.ids == ["q1", "data.jsonl:2"] and samples.questions == ["Who?", "When?"]
    assert samples.paths == [path, tmp_path / "a.txt"]


def test_load_jsonl_match_says_whether_one_answer_will_do(write):
    samples = load_jsonl(write(GOOD, {**GOOD, "match": "any"}, {**GOOD, "match": "all"}))
    assert [sample.match for sample in samples] == ["any", "any", "all"]
    assert [sample.metadata for sample in samples] == [{}] * 3


def test_load_jsonl_one_answer_as_text_is_one_answer(write):
    assert load_jsonl(write({**GOOD, "answers": "Ed"}))[0].answers == ("Ed",)


def test_load_jsonl_ids_default_to_the_line_and_numbers_become_text(write):
    samples = load_jsonl(write(GOOD, {**GOOD, "id": 7}, {**GOOD, "id": "x"}))
    assert [sample.id for sample in samples] == ["data.jsonl:1", "7", "x"]


def test_load_jsonl_random_access_finds_the_right_line(write):
    # Characters of one to four bytes, blank lines, both line ends, and a last line without an end.
    texts = ["a", "\u00e9" * 5, "\u5317\u4eac", "\U0001f600" * 3, "z"]
    lines = [json.dumps({**GOOD, "context": text}, ensure_ascii=False).encode() for text in texts]
    path = write(lines[0], b"", lines[1] + b"\r", b"  \t", lines[2], lines[3], name="mixed.jsonl")
    path.write_bytes(path.read_bytes() + lines[4])
    samples = load_jsonl(path)
    assert len(samples) == 5
    for i in (3, 0, 4, 1, 2, -1, -5):
        assert samples[i].context == texts[i]
    assert [sample.context for sample in samples[1:4]] == texts[1:4]
    assert [sample.id for sample in samples] == [f"mixed.jsonl:{line}" for line in (1, 3, 5, 6, 7)]
    for index in (5, -6):
        with pytest.raises(IndexError, match=f"sample {index} of 5"):
            samples[index]


def test_load_jsonl_byte_order_mark_is_skipped(write):
    path = write(b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), {**GOOD, "question": "When?"})
    assert [sample.question for sample in load_jsonl(path)] == ["Who?", "When?"]


def test_load_jsonl_context_may_be_empty(write):
    assert load_jsonl(write({**GOOD, "context": ""}))[0].context == ""


def test_load_jsonl_file_is_relative_to_the_jsonl_file(write, tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo \xc3\xa9")
    monkeypatch.chdir(tmp_path / "texts")
    row = {"question": "Who?", "file": "texts/a.txt", "answers": "Ed"}
    sample = load_jsonl(write(row))[0]
    assert sample.context == "one\ntwo \u00e9"
    assert sample.metadata == {}


def test_load_jsonl_can_be_pickled_for_workers(write):
    samples = pickle.loads(pickle.dumps(load_jsonl(write(GOOD, {**GOOD, "question": "When?"}))))
    assert samples[1].question == "When?"


def test_load_jsonl_keeps_no_documents_in_memory(write):
    samples = load_jsonl(write(*[{**GOOD, "context": "x" * 100_000}] * 20))
    assert len(pickle.dumps(samples)) < 10_000


def test_load_jsonl_file_that_changes_is_noticed(write):
    path = write(GOOD)
    samples = load_jsonl(path)
    write({**GOOD, "question": "Something else altogether?"})
    with pytest.raises(ValueError, match="changed while the run reads it"):
        samples[0]


def test_load_jsonl_touched_file_is_read_on_and_a_changed_one_is_not(write):
    path = write(GOOD)
    samples = load_jsonl(path)
    for when in (1, 2**31):
        os.utime(path, (when, when))
        assert samples[0].question == "Who?"
    write({**GOOD, "question": "Why?"})  # of the same size
    os.utime(path, (2**31, 2**31))
    assert samples[0].question == "Why?", "neither size nor time have changed"
    os.utime(path, (3, 3))
    with pytest.raises(ValueError, match=rf"^{path}: changed while the run reads it; "):
        samples[0]
    path.unlink()
    with pytest.raises(ValueError, match="No such file"):
        samples[0]


def without(key):
    return {name: value for name, value in GOOD.items() if name != key}


BAD_LINES = {
    # name: (a bad line, what the message must name besides the file and the line)
    "not json": (b"{question: 1}", ["JSON"]),
    "an array": ([GOOD], ["object", "a list"]),
    "a string": ("text", ["object", "text"]),
    "cut off": (b'{"question": "Who?"', ["JSON"]),
    "too deep": (b"[" * 100_000, ["JSON"]),
    "not utf-8": (json.dumps(GOOD).encode().replace(b"Ed", b"\xe9d"), ["0xe9", "UTF-8"]),
    "a key twice": (b'{"question": "a", "question": "b"}', ["'question'", "twice"]),
    "no question": (without("question"), ["question", "missing"]),
    "question not text": ({**GOOD, "question": 3}, ["question", "the number 3", "text"]),
    "question blank": ({**GOOD, "question": " \n"}, ["question", "blank"]),
    "question null": ({**GOOD, "question": None}, ["question", "null"]),
    "no answers": (without("answers"), ["answers", "missing"]),
    "answers empty": ({**GOOD, "answers": []}, ["answers", "at least one"]),
    "answers a number": ({**GOOD, "answers": 1889}, ["answers", "1889", "list of texts"]),
    "answers of numbers": ({**GOOD, "answers": ["Ed", 1889]}, ["answers", "1889"]),
    "answers blank": ({**GOOD, "answers": ["Ed", ""]}, ["answers", "blank"]),
    "no context": (without("context"), ["context", "file", "missing"]),
    "context and file": ({**GOOD, "file": "a.txt"}, ["context", "file", "both"]),
    "context not text": ({**GOOD, "context": ["a", "b"]}, ["context", "a list", "text"]),
    "file not text": ({**without("context"), "file": 1}, ["file", "path"]),
    "no such file": ({**without("context"), "file": "none.txt"}, ["file", "none.txt", "No such file"]),
    "a folder": ({**without("context"), "file": "."}, ["file", "directory"]),
    "null in file": ({**without("context"), "file": "a\0b"}, ["file"]),
    "match": ({**GOOD, "match": "both"}, ["match", "both", '"any" or "all"']),
    "match null": ({**GOOD, "match": None}, ["match", "null"]),
    "match a list": ({**GOOD, "match": ["all"]}, ["match", "a list"]),
    "id a list": ({**GOOD, "id": ["a"]}, ["id", "a list"]),
    "id true": ({**GOOD, "id": True}, ["id", "true"]),
    "id blank": ({**GOOD, "id": ""}, ["id", "blank"]),
    "id null": ({**GOOD, "id": None}, ["id", "null"]),
    "id twice": ({**GOOD, "id": "first"}, ["id", "'first'", "line 1", "unique"]),
    "depths a number": ({**GOOD, "depths": 0.5}, ["depths", "the number 0.5", "list of numbers from 0 to 1"]),
    "depths null": ({**GOOD, "depths": None}, ["depths", "null"]),
    "depths above 1": ({**GOOD, "depths": [0.5, 1.5]}, ["depths", "1.5"]),
    "depths not numbers": ({**GOOD, "depths": [True]}, ["depths", "the truth value true"]),
    "depths nowhere": (b'{"question": "Who?", "context": "", "answers": ["Ed"], "depths": [NaN]}', ["depths", "NaN"]),
    "evidence an object": ({**GOOD, "evidence": {"begin": 0}}, ["evidence", "an object", "list of objects"]),
    "evidence of texts": ({**GOOD, "evidence": ["Ed"]}, ["evidence", "list of objects"]),
    "evidence begins in words": ({**GOOD, "evidence": [{"begin": "here"}]}, ["evidence: begin", "here", "whole number"]),
    "evidence ends between": ({**GOOD, "evidence": [{"begin": 0, "end": 1.5}]}, ["evidence: end", "1.5"]),
    "evidence begins before": ({**GOOD, "evidence": [{"begin": -1}]}, ["evidence: begin", "-1"]),
    "a number of 400 digits": (json.dumps({**GOOD, "n": 1}).encode().replace(b": 1}", b": " + b"1" * 400 + b"}"), ["400 digits"]),
    "a number beyond floats": (json.dumps({**GOOD, "n": 1}).encode().replace(b": 1}", b": [1e999]}"), ["n: inf", "no number"]),
    "no number": ({**GOOD, "n": {"a": float("nan")}}, ["n: nan", "no number of JSON"]),
    "metadata too deep": (
        json.dumps({**GOOD, "n": 0}).encode().replace(b": 0", b": " + b"[" * 60 + b"]" * 60),
        ["n: ", "50 deep"],
    ),
    "metadata half a pair": ({**GOOD, "n": ["\udc00"]}, ["n: ", "surrogate"]),
    "a name of half a pair": ({**GOOD, "\udc00": 1}, ["surrogate"]),
    "many answers that are none": ({**GOOD, "answers": [1] * 10_000}, ["answers: got the number 1"]),
    "a long id": ({**GOOD, "id": "x" * 1001}, ["id", "1000"]),
    "a null byte": (json.dumps(GOOD).encode().replace(b"Ed d", b"Ed\0d"), ["control character"]),
    "half a surrogate pair": ({**GOOD, "context": "ok \ud800"}, ["context", "surrogate"]),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_load_jsonl_bad_line_is_named(write, name):
    bad, words = BAD_LINES[name]
    path = write({**GOOD, "id": "first"}, b"", bad)
    with pytest.raises(ValueError) as caught:
        load_jsonl(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: line 3: ")
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_load_jsonl_line_without_end_is_refused(write, monkeypatch):
    monkeypatch.setattr(custom, "MOST_BYTES", 1000)
    good = json.dumps(GOOD).encode()
    assert len(load_jsonl(write(good + b" " * (999 - len(good))))) == 1
    with pytest.raises(ValueError, match=r"line 2: is longer than 0 MiB"):
        load_jsonl(write(good, good + b" " * (1000 - len(good))))


def test_load_jsonl_values_are_counted_before_they_take_memory(write, monkeypatch):
    monkeypatch.setattr(json_values, "VALUES", 100)
    monkeypatch.setattr(json_values, "UNCOUNTED", 100)
    text = {**GOOD, "context": '[{,"\\' * 1000}
    assert load_jsonl(write(text))[0].context == text["context"], "what stands in a text does not count"
    for bomb in (b'{"a": [' + b"[]," * 200, b'{"a": "\\\\", "b": [' + b"[]," * 200, b"{" + b'"' * 1000 + b"," * 101):
        with pytest.raises(ValueError, match=r"line 1: .*more than 100 values"):
            load_jsonl(write(bomb))


def test_load_jsonl_last_line_needs_no_end(write):
    path = write(GOOD, GOOD)
    path.write_bytes(path.read_bytes()[:-1])
    assert [sample.context for sample in load_jsonl(path)] == ["Ed did."] * 2


def test_load_json_list_is_read_like_lines(write, monkeypatch):
    rows = [{**GOOD, "context": f"na\u00efve {i} \U0001f600 " * i, "answers": str(i)} for i in range(30)]
    lines = load_jsonl(write(*rows))
    for block in (1, 7, 100, 2**20):
        monkeypatch.setattr("memrl.data.corpora.items._BLOCK", block)
        for start, options in ((b"", {}), (b"\xef\xbb\xbf \n", {"ensure_ascii": False, "indent": 1})):
            path = write(start + json.dumps(rows, **options).encode(), name="data.json")
            samples = load_jsonl(path)
            assert [samples[i].context for i in (29, 0, 7)] == [lines[i].context for i in (29, 0, 7)]
            assert samples.ids[2] == "data.json:3"
    with pytest.raises(ValueError, match=r"item 2: question"):
        load_jsonl(write(json.dumps([GOOD, {**GOOD, "question": ""}]).encode()))
    for broken in (b"[", b"[]", b"[1]", b"[{]", b"[" * 10**6, json.dumps([GOOD, GOOD]).encode()[:-1]):
        with pytest.raises(ValueError, match=r"data\.jsonl: "):
            load_jsonl(write(broken))


def test_load_jsonl_document_that_is_not_utf8_is_named(write, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"line 1: file: .*a\.txt is not UTF-8"):
        load_jsonl(write({**without("context"), "file": "a.txt"}))


@pytest.mark.parametrize("content", [b"", b"\n  \n", b"\xef\xbb\xbf"])
def test_load_jsonl_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="no samples"):
        load_jsonl(path)


def test_load_jsonl_missing_file_or_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        load_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="not a file"):
        load_jsonl(tmp_path)


def test_reading_data_does_not_import_torch():
    script = "import sys, memrl.data, memrl.data.parquet, memrl.scoring.verify; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0
