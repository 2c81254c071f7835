"""Data from elsewhere: whatever bytes a file holds, there are samples, or one line that names the file; in bounded memory."""

import datetime
import decimal
import io
import json
import os
import random
import tempfile
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memrl.__main__ import main
from memrl.data import load_samples
from memrl.data.corpora import read_source
from memrl.data.custom import JsonlSamples
from memrl.data.parquet import ParquetSamples
from memrl.utils.journal import read_records
from tests.test_sources import hotpot_item, hub_row, musique_item, squad_file, squad_rows

GOOD = {"question": "Who?", "context": "Ed did.", "answers": ["Ed"]}
RICH = {**GOOD, "id": "q", "match": "all", "depths": [0.5], "evidence": [{"begin": 0, "end": 3}], "note": {"a": ["x", None]}}


@pytest.fixture
def columns(tmp_path):
    """columns(name=array, ...): the samples of a parquet file with these columns beside the needed ones."""

    def columns(rows=1, **others):
        table = pa.table({**{name: [value] * rows for name, value in GOOD.items()}, **others})
        pq.write_table(table, tmp_path / "data.parquet")
        return load_samples(tmp_path / "data.parquet")

    return columns


def refused(path, action) -> str:
    """The message of the ValueError that `action` raises: one line that begins with the file."""
    with pytest.raises(ValueError) as caught:
        action(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message and len(message) < 1000, message[:2000]
    return message


# --- parquet: values that JSON has not ----------------------------------------------------------------------


def test_times_and_decimals_become_text_wherever_they_stand(columns):
    when = datetime.datetime(2024, 2, 29, 12, 30, 0, 250)
    samples = columns(
        at=pa.array([when], pa.timestamp("us")),
        fine=pa.array([1], pa.timestamp("ns", "UTC")),
        far=pa.array([2**62], pa.timestamp("ms")),
        day=pa.array([when.date()]),
        hour=pa.array([when.time()]),
        price=pa.array([decimal.Decimal("1.50")]),
        days=pa.array([[when.date(), None]]),
        both=pa.array([{"at": when, "n": 1}]),
        half=pa.array([1.5], pa.float16()),
    )
    metadata = samples[0].metadata
    assert json.loads(json.dumps(metadata, allow_nan=False)) == metadata
    assert (metadata["at"], metadata["fine"]) == ("2024-02-29 12:30:00.000250", "1970-01-01 00:00:00.000000001Z")
    assert (metadata["day"], metadata["hour"], metadata["price"]) == ("2024-02-29", "12:30:00.000250", "1.50")
    assert (metadata["days"], metadata["both"]["at"], metadata["half"]) == (["2024-02-29", None], metadata["at"], 1.5)
    assert "out of range" in metadata["far"]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"\xff"]),
        pa.array([[b"x"]]),
        pa.array([{"a": {"b": b"x"}}]),
        pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
        pa.array([datetime.timedelta(1)]),
        pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]),
    ],
)
def test_columns_that_no_result_could_hold_are_refused_by_name(columns, tmp_path, column):
    message = refused(tmp_path / "data.parquet", lambda path: columns(blob=column))
    assert "column 'blob': its type is" in message and "convert or drop the column" in message


def test_numbers_that_json_has_not_are_refused_by_row_and_column(columns, tmp_path):
    for value in (float("nan"), float("inf")):
        message = refused(tmp_path / "data.parquet", lambda path, value=value: columns(2, score=pa.array([1.0, value])))
        assert "row 2: score: " in message and "null" in message
    assert columns(2, score=pa.array([1.0, None]))[1].metadata == {}


def test_two_columns_of_a_name_are_refused(tmp_path):
    names = [*GOOD, "x", "x"]
    table = pa.Table.from_arrays([pa.array([GOOD.get(name, 1)]) for name in names], names=names)
    pq.write_table(table, tmp_path / "data.parquet")
    assert "2 columns named 'x'" in refused(tmp_path / "data.parquet", load_samples)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (pa.array([7]), "marked as JSON, and its type is int64"),
        (pa.array(["["]), "row 1: note: "),
        (pa.array(["[" * 100_000]), "row 1: note: "),
        (pa.array(["[" * 60 + "]" * 60]), "row 1: note: has lists and objects in each other"),
        (pa.array(["1" * 400]), "row 1: note: a number of 400 digits"),
        (pa.array(['{"a": 1, "a": 2}']), "row 1: note: the key 'a' stands twice"),
        (pa.array(["NaN"]), "row 1: note: nan is no number"),
        (pa.array(['"\\ud800"']), "row 1: note: character 0 is half a surrogate pair"),
    ],
)
def test_columns_of_json_are_checked_when_the_file_is_opened(tmp_path, array, words):
    field = pa.field("note", array.type, metadata={"memrl": "json"})
    table = pa.table({name: [value] for name, value in GOOD.items()}).append_column(field, array)
    pq.write_table(table, tmp_path / "data.parquet")
    assert words in refused(tmp_path / "data.parquet", load_samples)


# --- parquet: size ------------------------------------------------------------------------------------------


def test_a_text_that_many_rows_share_is_held_once(tmp_path):
    rows, text = 3000, "x" * 400_000  # 1.2 GB in each column if each row had its own
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    data = {"question": ["Who?"] * rows, "context": shared, "answers": [["Ed"]] * rows, "note": shared}
    pq.write_table(pa.table(data), tmp_path / "data.parquet", compression="zstd", store_schema=False)  # as other writers do
    assert os.path.getsize(tmp_path / "data.parquet") < 100_000
    held = pa.total_allocated_bytes()
    samples = load_samples(tmp_path / "data.parquet")
    assert samples[rows - 1].context == text == samples[0].metadata["note"]
    assert pa.total_allocated_bytes() - held < 2**26
    assert len({id(question) for question in samples.questions}) == 1


def test_more_rows_than_bytes_are_refused_before_they_are_read(tmp_path):
    rows = 10**6
    same = {name: pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x"])) for name in GOOD}
    pq.write_table(pa.table(same), tmp_path / "data.parquet")
    assert "says that it has 1000000 rows" in refused(tmp_path / "data.parquet", load_samples)


def test_a_data_set_that_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.mkfifo(tmp_path / "pipe.parquet")
    for path in (
        tmp_path / "pipe.jsonl",
        tmp_path / "pipe.parquet",
        Path("/dev/zero"),
        Path("/dev/null"),
        tmp_path / "none.json",
    ):
        refused(path, load_samples)
        refused(path, read_source)
    for name in ("data.parquet", "data.jsonl"):
        (tmp_path / name).write_bytes(b"PAR1" + b"\0" * 100)
        refused(tmp_path / name, load_samples)
        refused(tmp_path / name, read_source)


# --- any bytes ----------------------------------------------------------------------------------------------


def parquet_bytes(rows) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, compression="none", use_dictionary=False)
    return buffer.getvalue()


def json_lines(rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


ORIGINAL = {"prompt": [{"role": "user", "content": "Who?"}], "context": "Ed.", "reward_model": {"ground_truth": ["Ed"]}}
EVALUATION = {"context": "Ed.", "input": "Who?", "answers": ["Ed"], "num_docs": 1, "index": 0}
FILES = {
    "jsonl": (JsonlSamples, json_lines([RICH, {**GOOD, "answers": "Ed"}])),
    "list": (JsonlSamples, json.dumps([EVALUATION, {**EVALUATION, "outputs": ["a", "b"]}], indent=1).encode()),
    "parquet": (lambda path: ParquetSamples([path]), parquet_bytes([RICH, {**RICH, "id": "r"}])),
    "original": (lambda path: ParquetSamples([path]), parquet_bytes([ORIGINAL])),
    "hotpotqa": (read_source, json.dumps([hotpot_item(0), hotpot_item(1)]).encode()),
    "hub": (read_source, parquet_bytes([hub_row(hotpot_item(0))])),
    "squad": (read_source, json.dumps(squad_file()).encode()),
    "squad rows": (read_source, json.dumps(squad_rows()).encode()),
    "musique": (read_source, json_lines([musique_item(0), musique_item(1)])),
}
PIECES = [
    b'"',
    b"{",
    b"[",
    b"]",
    b"}",
    b",",
    b":",
    b"\\",
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"9" * 400,
    b"NaN",
    b"\xff",
    b"\0",
    b"\n",
    b"\r",
]
PIECES += [
    b"\\ud800",
    b"\\u0000",
    b"[" * 2000,
    b'{"a":' * 2000,
    b'"question"',
    b'"file": "/etc/passwd"',
    b"\xef\xbb\xbf",
    b"\x80",
    b" " * 99,
]


def spoilt(content: bytes, rng: random.Random) -> bytes:
    """The content with a few random changes: pieces put in or in place of others, bits turned, parts cut or doubled."""
    for _ in range(rng.randint(1, 4)):
        place, piece = rng.randrange(len(content) + 1), rng.choice(PIECES)
        kind = rng.randrange(5)
        if kind == 0:
            content = content[:place] + piece + content[place:]
        elif kind == 1:
            content = content[:place] + piece + content[place + len(piece) :]
        elif kind == 2 and content:
            place %= len(content)
            content = content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
        elif kind == 3:
            content = content[: place + 1] if rng.random() < 0.5 else content[place:]
        else:
            content = content[:place] + content[place // 2 :]
    return content


def check_any_bytes(read, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data"
        path.write_bytes(content)
        try:
            found = read(path)
            if not hasattr(found, "kind"):
                json.dumps([sample.metadata for sample in found], allow_nan=False).encode()
        except ValueError as error:
            message = str(error)
            assert message.startswith(str(path)) and "\n" not in message and len(message) < 1000, message[:2000]


@pytest.mark.parametrize("name", FILES)
def test_a_spoilt_file_gives_samples_or_one_line_that_names_it(name):
    read, content = FILES[name]
    check_any_bytes(read, content)
    rng = random.Random(name)
    for _ in range(60):
        check_any_bytes(read, spoilt(content, rng))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([JsonlSamples, read_source, lambda path: ParquetSamples([path])]), st.binary(max_size=200))
def test_any_bytes_give_samples_or_one_line_that_names_the_file(read, content):
    check_any_bytes(read, content)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud800") | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "id",
    "question",
    "answers",
    "context",
    "file",
    "match",
    "depths",
    "evidence",
    "input",
    "outputs",
    "data",
    "paragraphs",
    "_id",
]
FIELDS += ["supporting_facts", "title", "text", "answer", "is_impossible", "answerable"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), values, max_size=5), min_size=1, max_size=2), st.booleans())
def test_any_values_in_the_fields_give_samples_or_one_line(changes, is_list):
    for base in (GOOD, EVALUATION, hotpot_item(0)):
        rows = [{**base, **change} for change in changes]
        content = json.dumps(rows).encode() if is_list else json_lines(rows)
        check_any_bytes(JsonlSamples, content)
        check_any_bytes(read_source, content)


def test_a_line_without_end_is_refused_before_the_whole_file_is_read(tmp_path, monkeypatch):
    """The file has 64 GiB: to hash it or to hold it would take minutes or all memory."""
    monkeypatch.setattr("memrl.data.custom.MOST_BYTES", 2**20)
    monkeypatch.setattr("memrl.data.corpora.items.MOST_BYTES", 2**20)
    for name, start, action in (
        ("data.jsonl", b"", JsonlSamples),
        ("data.parquet", b"PAR1", lambda path: ParquetSamples([path])),
        ("lines.jsonl", b"{", lambda path: read_source(path, "hotpotqa")),
        ("nothing.json", b"", lambda path: read_source(path, "squad")),
        ("rollouts.jsonl", b"", read_records),
    ):
        path = tmp_path / name
        path.write_bytes(start)
        os.truncate(path, 2**36)
        tracemalloc.start()
        refused(path, action)
        assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
        tracemalloc.stop()


def test_a_loop_of_links_is_one_line(tmp_path, capsys):
    (tmp_path / "loop.json").symlink_to("loop.json")
    with pytest.raises(SystemExit) as stop:
        main(["data", "squad", str(tmp_path / "loop.json"), "--documents", "2", "--out", str(tmp_path / "out.jsonl")])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "loop" in error
