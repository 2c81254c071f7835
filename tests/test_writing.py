"""Writing data sets: what is written comes back, whatever the interruption the bytes are the same, and nothing is replaced."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memrl.data import columns, load_samples, to_row
from memrl.types import Sample
from tests.workers.write_samples import COUNT, make, write

FORMATS = [".jsonl", ".parquet"]


def journal_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial.jsonl")


@pytest.fixture(params=FORMATS)
def path(request, tmp_path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / f"data{request.param}"


@pytest.fixture
def whole(path, tmp_path) -> bytes:
    """The bytes that an undisturbed run writes."""
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole" / path.name)
    return (tmp_path / "whole" / path.name).read_bytes()


# --- rows ---------------------------------------------------------------------------------------------------


def test_a_row_is_the_custom_format():
    sample = Sample("a", "Who?", "Ed.", ("Ed",), metadata={"depths": [0.5]})
    assert to_row(sample) == {"id": "a", "question": "Who?", "answers": ["Ed"], "depths": [0.5], "context": "Ed."}
    assert list(to_row(sample))[-1] == "context", "so that a line can be read from its left"
    assert to_row(Sample("a", "?", "", ("b", "c"), "all"))["match"] == "all"


@pytest.mark.parametrize("name", ["id", "question", "context", "file", "answers", "match"])
def test_metadata_that_would_be_a_field_is_refused(name):
    with pytest.raises(ValueError, match=f"metadata: '{name}' is a field"):
        to_row(Sample("a", "Who?", "", ("Ed",), metadata={name: "x"}))


# --- what is written comes back -----------------------------------------------------------------------------


def test_samples_come_back_as_they_were(path):
    write(path)
    assert list(load_samples(path)) == [make(i) for i in range(COUNT)]
    assert sorted(os.listdir(path.parent)) == [path.name, f"{path.name}.recipe.json"]


METADATA = {
    "texts": ["", "a\nb", "\u5317\U0001f600"],
    "whole numbers": [0, -(2**63), 2**63 - 1],
    "numbers beyond 64 bits": [2**63, -(2**63) - 1],
    "floats": [0.1, -0.0, 5e-324],
    "whole numbers and floats": [1, 2.5],
    "truth values": [True, False],
    "truth values and numbers": [True, 1],
    "null": [None, 1],
    "lists": [[1], [], [2, 3]],
    "lists that are all empty": [[], []],
    "lists of lists": [[[1.5], []], []],
    "lists with null": [[None, "a"], ["b"]],
    "mixed lists": [["a", 1], [2.5]],
    "objects": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}],
    "objects with other names": [{"a": 1}, {"b": 1}],
    "objects in another order": [{"a": 1, "b": 2}, {"b": 3, "a": 4}],
    "empty objects": [{}, {"a": 1}],
    "an empty name": [{"": 1}, {"": 2}],
    "evidence": [[{"title": "t", "places": []}], [{"title": "u", "places": [1]}], []],
    "deep": [{"a": {"b": [{"c": [True]}]}}, {"a": {"b": []}}],
}


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("name", METADATA)
def test_metadata_of_every_kind_comes_back(tmp_path, suffix, name):
    values = METADATA[name]
    samples = [Sample(f"s{i}", "Who?", "", ("Ed",), metadata={"value": value}) for i, value in enumerate(values)]
    samples.append(Sample("none", "Who?", "", ("Ed",)))
    write(tmp_path / f"data{suffix}", samples.__getitem__, len(samples))
    loaded = list(load_samples(tmp_path / f"data{suffix}"))
    assert loaded == samples
    assert [repr(sample.metadata) for sample in loaded] == [repr(sample.metadata) for sample in samples], "types and order too"


def test_metadata_of_one_type_is_a_column_of_that_type_and_other_metadata_is_json(tmp_path):
    rows = [{"n": 1, "odd": 1, "evidence": []}, {"odd": "a", "evidence": [{"title": "t", "begin": 0}]}]
    samples = [Sample(f"s{i}", "Who?", "", ("Ed",), metadata=row) for i, row in enumerate(rows)]
    write(tmp_path / "data.parquet", samples.__getitem__, 2)
    schema = pq.read_schema(tmp_path / "data.parquet")
    assert schema.names == ["id", "question", "answers", "match", "context", "n", "odd", "evidence"]
    assert schema.field("n").type == pa.int64()
    assert schema.field("evidence").type == pa.list_(pa.struct({"title": pa.string(), "begin": pa.int64()}))
    assert schema.field("odd").type == pa.string() and schema.field("odd").metadata == {b"memrl": b"json"}


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
filled = texts.filter(str.strip)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
names = texts.filter(lambda name: name not in ("id", "question", "context", "file", "answers", "match", ""))
metadata = st.dictionaries(names | st.sampled_from(["a", "b"]), values, max_size=3)
samples_of_all_kinds = st.lists(
    st.builds(
        Sample,
        id=filled,
        question=filled,
        context=texts,
        answers=st.lists(filled, min_size=1, max_size=3).map(tuple),
        match=st.sampled_from(["any", "all"]),
        metadata=metadata,
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda sample: sample.id,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(samples=samples_of_all_kinds, suffix=st.sampled_from(FORMATS))
def test_any_samples_come_back(tmp_path_factory, samples, suffix):
    path = tmp_path_factory.mktemp("any") / f"data{suffix}"
    write(path, samples.__getitem__, len(samples))
    loaded = list(load_samples(path))
    assert loaded == samples
    # 1, 1.0 and True are equal, but not as JSON. Parquet's columns have one order for all rows.
    exact = [[json.dumps(sample.metadata, sort_keys=True) for sample in some] for some in (loaded, samples)]
    assert exact[0] == exact[1]


def test_row_groups_are_bounded_by_bytes_and_no_more_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "GROUP_BYTES", 100_000)
    held = []
    from_pylist = pa.Table.from_pylist

    class Table:
        @staticmethod
        def from_pylist(rows, schema):
            held.append([len(row["context"]) for row in rows])
            return from_pylist(rows, schema)

    monkeypatch.setattr(columns.pa, "Table", Table)
    sizes = [30_000, 40_000, 50_000, 10, 400_000, 20_000]
    write(tmp_path / "data.parquet", lambda i: Sample(str(i), "?", "x" * sizes[i], ("a",)), len(sizes))
    assert held == [[30_000, 40_000, 50_000], [10, 400_000], [20_000]]
    about = pq.ParquetFile(tmp_path / "data.parquet").metadata
    assert [about.row_group(i).num_rows for i in range(about.num_row_groups)] == [3, 2, 1]


# --- interruptions ------------------------------------------------------------------------------------------


WORKER = [sys.executable, str(Path(__file__).parent / "workers" / "write_samples.py")]


def child(path, moment, number):
    return subprocess.run([*WORKER, str(path), moment, str(number)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("moment", "numbers"),
    [("make", (0, 1, 7)), *((moment, (4,)) for moment in ("finish", "write_table", "sync", "recipe", "replace", "after"))],
)
def test_killed_at_any_moment_the_same_command_ends_in_the_same_bytes(path, whole, moment, numbers):
    if moment == "write_table" and path.suffix == ".jsonl":
        pytest.skip("JSON lines are copied")
    for number in numbers:  # one kill after another
        done = child(path, moment, number)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert path.exists() == (moment == "after"), "nothing half written appears"
    called = []
    write(path, lambda index: called.append(index) or make(index))
    assert path.read_bytes() == whole
    assert called == (list(range(7, COUNT)) if moment == "make" else []), "only the rest is made"
    assert {name for name in os.listdir(path.parent) if not name.startswith(".")} == {path.name, f"{path.name}.recipe.json"}


def test_killed_from_outside_again_and_again_it_ends_in_the_same_bytes(path, tmp_path):
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole" / path.name, count=40)
    for size in (1, 700, 6_000):
        process = subprocess.Popen([*WORKER, str(path), "slow", "40"], stderr=subprocess.DEVNULL)
        while process.poll() is None and not (journal_of(path).exists() and journal_of(path).stat().st_size >= size):
            time.sleep(0.001)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    write(path, count=40)
    assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()
    assert not journal_of(path).exists()


class Stop(Exception):
    pass


def stop_at(number):
    def maker(index):
        if index == number:
            raise Stop
        return make(index)

    return maker


def test_torn_and_spoilt_lines_of_the_journal_are_made_again(path, whole):
    with pytest.raises(Stop):
        write(path, stop_at(6))
    journal = journal_of(path)
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 7 and json.loads(lines[0]) == {"recipe": {"seed": 1}, "samples": COUNT}
    spoilt = {
        "torn": (b"".join(lines)[:-5], 5),
        "without its end": (b"".join(lines)[:-1], 5),
        "zeros at the end": (b"".join(lines) + b"\0" * 99 + b"\n", 6),
        "zeros in the middle": (b"".join(lines[:3]) + b"\0" * 40 + b"\n" + lines[4], 2),
        "bytes that are no text": (b"".join(lines[:3]) + b'{"id": "\xff"}\n', 2),
        "a torn recipe": (lines[0][:-4], 0),
        "nothing": (b"", 0),
    }
    for name, (content, kept) in spoilt.items():
        path.unlink(missing_ok=True)
        journal.write_bytes(content)
        called = []
        write(path, lambda index, called=called: called.append(index) or make(index))
        assert path.read_bytes() == whole, name
        assert called == list(range(kept, COUNT)), name


def test_other_settings_begin_anew_and_say_so(path, capsys):
    with pytest.raises(Stop):
        write(path, stop_at(6), seed=2)
    capsys.readouterr()
    called = []
    write(path, lambda index: called.append(index) or make(index))
    assert called == list(range(COUNT))
    assert capsys.readouterr().err.count("other settings; starting over") == 1
    assert list(load_samples(path)) == [make(i) for i in range(COUNT)]


def test_progress_counts_what_was_there_before(path, capsys):
    with pytest.raises(Stop):
        write(path, stop_at(6))
    assert "6/12 samples  50%" in capsys.readouterr().err
    write(path)
    assert "12/12 samples  100%" in capsys.readouterr().err


def test_a_mistake_before_the_first_row_leaves_nothing(path):
    with pytest.raises(Stop):
        write(path, stop_at(0))
    assert os.listdir(path.parent) == []


def test_two_processes_do_not_write_one_file(path):
    with open(journal_of(path), "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is writing it"):
            write(path)
        assert journal_of(path).exists()
    write(path)
    assert len(load_samples(path)) == COUNT


@pytest.mark.parametrize("limit", [400, 1_500])
def test_where_there_is_no_room_one_line_says_so_and_the_same_command_goes_on_later(path, whole, limit):
    done = child(path, "full", limit)
    assert done.returncode == 2
    assert "File too large" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert not path.exists()
    called = []
    write(path, lambda index: called.append(index) or make(index))
    assert path.read_bytes() == whole
    assert 0 < len(called) < COUNT


# --- what is there already ----------------------------------------------------------------------------------


def test_the_same_command_finds_its_work_done(path, capsys):
    write(path)
    before = path.stat().st_mtime_ns
    capsys.readouterr()
    write(path, stop_at(0))
    assert path.stat().st_mtime_ns == before
    assert capsys.readouterr().err == f"{path}: exists already, made by the same command\n"


def test_a_file_of_other_settings_is_never_replaced(path):
    write(path)
    before = path.read_bytes()
    others = {"seed 1 instead of 2": {"seed": 2}, "samples 12 instead of 5": {"count": 5}, "x null instead of 0": {"x": 0}}
    for words, change in others.items():
        with pytest.raises(ValueError, match=f"was made with other settings \\({words}\\); delete it"):
            write(path, **change)
    assert path.read_bytes() == before and not journal_of(path).exists()


def test_a_file_that_was_changed_or_made_otherwise_is_never_replaced(path):
    write(path)
    with open(path, "ab") as file:
        file.write(b"\n")
    with pytest.raises(ValueError, match="has changed since it was made"):
        write(path)
    for recipe in ("", "[]", "{}"):
        Path(f"{path}.recipe.json").write_text(recipe)
        with pytest.raises(ValueError, match="does not tell how it was made"):
            write(path)
    Path(f"{path}.recipe.json").unlink()
    with pytest.raises(ValueError, match="does not tell how it was made"):
        write(path)


def test_a_journal_left_behind_the_rename_is_removed(path):
    write(path)
    journal_of(path).write_bytes(b"{}\n")
    write(path)
    assert not journal_of(path).exists()
    journal_of(path).write_bytes(b"{}\n")
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="has changed"):
        write(path)
    assert journal_of(path).exists()


def test_a_deleted_file_is_made_again(path, whole):
    write(path, seed=2)
    path.unlink()
    write(path)
    assert path.read_bytes() == whole


# --- samples that cannot be written -------------------------------------------------------------------------


BAD = {
    "question": (Sample("a", " ", "", ("Ed",)), ["question", "blank"]),
    "answers": (Sample("a", "Who?", ""), ["answers", "at least one"]),
    "surrogate": (Sample("a", "Who?", "\ud800", ("Ed",)), ["context", "surrogate"]),
    "id": (Sample("s1", "Who?", "", ("Ed",)), ["id", "'s1'", "sample 2", "unique"]),
    "field": (Sample("a", "Who?", "", ("Ed",), metadata={"file": 1}), ["metadata", "'file'"]),
    "a set": (Sample("a", "Who?", "", ("Ed",), metadata={"x": {1}}), ["set"]),
    "not a number": (Sample("a", "Who?", "", ("Ed",), metadata={"x": float("nan")}), ["JSON"]),
    "match": (Sample("a", "Who?", "", ("Ed",), "some"), ["match", "some"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_sample_that_could_not_be_read_back_is_named(path, name):
    bad, words = BAD[name]
    with pytest.raises(ValueError) as caught:
        write(path, lambda index: bad if index == 4 else make(index))
    message = str(caught.value)
    assert message.startswith(f"{path}: sample 5: ")
    assert all(word in message for word in words), message
    assert not path.exists()


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.json: has to end in \.jsonl or \.parquet"):
        write(tmp_path / "data.json")
