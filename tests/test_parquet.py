"""Data sets as parquet: memrl's own columns and the original's in all their types, and what is refused in which words."""

import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memrl.data import load_samples
from memrl.data import parquet as module
from memrl.data.parquet import ParquetSamples

GOOD = {"question": "Who?", "context": "Ed did.", "answers": ["Ed"]}
PUBLISHED = {
    "data_source": "hotpotqa",
    "prompt": [{"role": "user", "content": "Who?"}],
    "context": "Document 1:\nEd\nEd did.",
    "ability": "memory",
    "reward_model": {"style": "rule", "ground_truth": ["Ed", "Edward"]},
    "extra_info": {"index": 7, "question": "Who?", "num_docs": 1},
}


@pytest.fixture
def write(tmp_path):
    """write(row, ..., name=..., schema=..., row_group_size=...): a parquet file of these rows."""

    def write(*rows, name="data.parquet", schema=None, **options):
        names = schema.names if schema else dict.fromkeys(key for row in rows for key in row)
        table = pa.table({key: [row.get(key) for row in rows] for key in names}, schema)
        pq.write_table(table, tmp_path / name, **options)
        return tmp_path / name

    return write


# --- memrl's own columns ------------------------------------------------------------------------------------


def test_own_columns_become_samples_and_the_others_their_metadata(write):
    row = {**GOOD, "id": "q1", "match": "all", "evidence": [{"title": "Ed", "begin": 0}], "depths": [0.0], "note": {"a": [1]}}
    (sample,) = load_samples(write(row))
    assert (sample.id, sample.question, sample.context, sample.answers, sample.match) == ("q1", "Who?", "Ed did.", ("Ed",), "all")
    assert sample.metadata == {"evidence": [{"title": "Ed", "begin": 0}], "depths": [0.0], "note": {"a": [1]}}


def test_optional_columns_may_be_absent_or_null(write):
    null = {"id": None, "match": None, "level": None}
    samples = load_samples(write(GOOD, {**GOOD, "id": "b", "level": "hard"}, {**GOOD, **null}))
    assert [sample.id for sample in samples] == ["data.parquet:1", "b", "data.parquet:3"]
    assert [sample.match for sample in samples] == ["any"] * 3
    assert [sample.metadata for sample in samples] == [{}, {"level": "hard"}, {}]
    assert samples.ids == [sample.id for sample in samples] and samples.questions == ["Who?"] * 3


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_texts_may_have_any_type_of_text(write, kind):
    schema = pa.schema([("question", kind), ("context", kind), ("answers", pa.large_list(pa.large_string()))])
    assert load_samples(write(GOOD, schema=schema))[0].context == "Ed did."


def test_one_answer_as_text_is_one_answer_and_numbers_become_ids(write):
    samples = load_samples(write({**GOOD, "answers": "Ed", "id": 5}))
    assert (samples[0].answers, samples[0].id) == (("Ed",), "5")


def test_documents_in_files_are_relative_to_the_parquet_file(write, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one")
    row = {"question": "Who?", "answers": ["Ed"], "file": "texts/a.txt"}
    samples = load_samples(write(row, {**row, "file": None, "context": "two"}))
    assert [sample.context for sample in samples] == ["one", "two"]
    assert samples.paths == [tmp_path / "data.parquet", tmp_path / "texts" / "a.txt"]


# --- the original's columns ---------------------------------------------------------------------------------


def test_the_originals_columns_become_samples(write):
    (sample,) = load_samples(write(PUBLISHED))
    assert (sample.id, sample.question, sample.answers, sample.match) == ("7", "Who?", ("Ed", "Edward"), "any")
    assert sample.context == "Document 1:\nEd\nEd did."
    assert sample.metadata == {"data_source": "hotpotqa", "ability": "memory", "extra_info": PUBLISHED["extra_info"]}


def variant(**changes):
    return {name: value for name, value in {**PUBLISHED, **changes}.items() if value is not None}


VARIANTS = {
    "one answer as text": (variant(reward_model={"ground_truth": "Ed"}), "7", ("Ed",)),
    "a system message first": (
        variant(prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]),
        "7",
        ("Ed", "Edward"),
    ),
    "the prompt as text": (variant(prompt="Who?"), "7", ("Ed", "Edward")),
    "an index that is text": (variant(extra_info={"index": "5a8b57f2"}), "5a8b57f2", ("Ed", "Edward")),
    "no index": (variant(extra_info={"num_docs": 1}), "data.parquet:1", ("Ed", "Edward")),
    "no extra_info": (variant(extra_info=None), "data.parquet:1", ("Ed", "Edward")),
    "pandas' index": (variant(__index_level_0__=12), "7", ("Ed", "Edward")),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_originals_columns_in_their_variants(write, name):
    row, sample_id, answers = VARIANTS[name]
    (sample,) = load_samples(write(row))
    assert (sample.id, sample.question, sample.answers) == (sample_id, "Who?", answers)
    assert sample.metadata.keys() <= {"data_source", "ability", "extra_info"}


def test_a_file_that_pandas_wrote_as_the_original_does(tmp_path):
    pandas = pytest.importorskip("pandas")
    numpy = pytest.importorskip("numpy")
    rows = [variant(extra_info={"index": i}, reward_model={"ground_truth": numpy.array([f"a{i}"])}) for i in range(20)]
    frame = pandas.DataFrame(rows)
    frame[frame.index % 2 == 1].to_parquet(tmp_path / "train.parquet")  # so that pandas keeps an index column
    samples = load_samples(tmp_path / "train.parquet")
    assert [sample.id for sample in samples] == [str(i) for i in range(1, 20, 2)]
    assert [sample.answers for sample in samples] == [(f"a{i}",) for i in range(1, 20, 2)]
    assert samples[0].metadata == {"data_source": "hotpotqa", "ability": "memory", "extra_info": {"index": 1}}


def test_an_index_that_repeats_in_published_files_is_no_id(write):
    samples = load_samples(write(PUBLISHED, variant(extra_info={"index": 8}), PUBLISHED))
    assert samples.ids == ["data.parquet:1", "data.parquet:2", "data.parquet:3"]
    assert [sample.id for sample in samples] == samples.ids


# --- mistakes -----------------------------------------------------------------------------------------------


def without(key, row=GOOD):
    return {name: value for name, value in row.items() if name != key}


BAD_ROWS = {
    # name: (good row before it, bad row, what the message must name besides file and row)
    "question null": (GOOD, {**GOOD, "question": None}, ["question", "missing"]),
    "question blank": (GOOD, {**GOOD, "question": " "}, ["question", "blank"]),
    "answers null": (GOOD, {**GOOD, "answers": None}, ["answers", "missing"]),
    "answers empty": (GOOD, {**GOOD, "answers": []}, ["answers", "at least one"]),
    "answers with null": (GOOD, {**GOOD, "answers": ["Ed", None]}, ["answers", "null"]),
    "context null": (GOOD, {**GOOD, "context": None}, ["context or file", "missing"]),
    "context and file": (GOOD, {**GOOD, "file": "a.txt"}, ["context or file", "both"]),
    "no such file": (GOOD, {**GOOD, "context": None, "file": "none.txt"}, ["file", "none.txt", "No such file"]),
    "match": (GOOD, {**GOOD, "match": "some"}, ["match", "some", '"all"']),
    "id twice": ({**GOOD, "id": "a"}, {**GOOD, "id": "a"}, ["id", "'a'", "row 1", "unique"]),
    "published, no user": (PUBLISHED, variant(prompt=[{"role": "system", "content": "Who?"}]), ["prompt", "user"]),
    "published, two users": (PUBLISHED, variant(prompt=PUBLISHED["prompt"] * 2), ["prompt", "one message"]),
    "published, nothing asked": (PUBLISHED, variant(prompt=[{"role": "user", "content": None}]), ["prompt", "one message"]),
    "published, blank": (PUBLISHED, variant(prompt=[{"role": "user", "content": ""}]), ["question", "blank"]),
    "published, no reward_model": (PUBLISHED, variant(reward_model=None), ["reward_model", "ground_truth"]),
    "published, no truth": (PUBLISHED, variant(reward_model={"style": "rule"}), ["reward_model.ground_truth", "null"]),
    "published, no context": (PUBLISHED, variant(context=None), ["context", "missing"]),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named(write, name):
    good, bad, words = BAD_ROWS[name]
    path = write(good, bad)
    with pytest.raises(ValueError) as caught:
        load_samples(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: row 2: ")
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_text_that_is_not_utf8_is_found_when_the_file_is_opened(tmp_path):
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"caf\xe9"]).buffers())
    pq.write_table(pa.table({"question": ["Who?"], "answers": [["Ed"]], "context": bad}), tmp_path / "data.parquet")
    with pytest.raises(ValueError, match=r"data\.parquet: rows 1 to 1: .*UTF8"):
        load_samples(tmp_path / "data.parquet")


FOREIGN = {
    "other columns": ({"text": "a", "label": 1}, ["label, text", '"question"', "prompt, reward_model, context"]),
    "no document": (without("context"), ["answers, question", '"context" or "file"']),
    "published, no document": (without("context", PUBLISHED), ["context", "no such column"]),
    "context of paragraphs": ({**GOOD, "context": {"title": ["a"]}}, ["context", "struct", "string"]),
    "hub HotpotQA": (
        {"id": "a", "question": "?", "answer": "b", "supporting_facts": {"title": ["t"]}, "context": {"title": ["t"]}},
        ["memrl data hotpotqa"],
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_answered_by_what_is_needed(write, name):
    row, words = FOREIGN[name]
    path = write(row)
    with pytest.raises(ValueError) as caught:
        load_samples(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    assert all(word in message for word in words), message


def test_own_metadata_may_be_called_like_hotpotqas(write):
    assert load_samples(write({**GOOD, "supporting_facts": ["a"]}))[0].metadata == {"supporting_facts": ["a"]}


@pytest.mark.parametrize("kept", [0, 3, 50, -8, -1])
def test_a_truncated_file_is_named_in_one_line(write, kept):
    path = write(*[GOOD] * 50)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="cannot be read as parquet") as caught:
        load_samples(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_file_with_spoilt_pages_is_named_in_one_line(write):
    path = write(*[{**GOOD, "context": f"text {i}" * 99} for i in range(50)], compression="zstd", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[10:400] = bytes(390)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="cannot be read as parquet") as caught:
        load_samples(path)
    assert "\n" not in str(caught.value)


def test_a_file_without_rows_and_a_missing_one_are_refused(write, tmp_path):
    with pytest.raises(ValueError, match="no samples"):
        load_samples(write(schema=pa.schema([("question", pa.string()), ("answers", pa.string()), ("context", pa.string())])))
    with pytest.raises(ValueError, match="No such file"):
        load_samples(tmp_path / "none.parquet")


# --- several files ------------------------------------------------------------------------------------------


def test_a_folder_or_a_pattern_is_its_parquet_files_in_the_order_of_their_names(write, tmp_path):
    for name in ("b", "a", "c"):
        write(*[{**GOOD, "id": f"{name}{i}"} for i in range(3)], name=f"{name}.parquet", row_group_size=2)
    (tmp_path / "README.md").write_text("not data")
    samples = load_samples(tmp_path)
    assert samples.ids == [sample.id for sample in samples] == [f"{name}{i}" for name in "abc" for i in range(3)]
    assert load_samples(tmp_path / "[bc].parquet").ids == samples.ids[3:]


def test_an_id_in_two_files_is_refused_and_an_index_in_two_published_files_is_no_id(write, tmp_path):
    for name in ("a.parquet", "b.parquet"):
        write({**GOOD, "id": "x"}, name=name)
    with pytest.raises(ValueError, match=r"b\.parquet: row 1: id: 'x' is the id of .*a\.parquet: row 1 too"):
        load_samples(tmp_path)
    for name in ("a.parquet", "b.parquet"):
        write(PUBLISHED, name=name)
    assert load_samples(tmp_path).ids == ["7", "b.parquet:1"]


def test_a_folder_without_parquet_files_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "*.parquet"):
        with pytest.raises(ValueError, match="no parquet file is there"):
            load_samples(path)


# --- reading when asked for ---------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """The row groups that were opened and the windows that were read: [(group, rows), ...]."""
    found = []
    batches = module._batches

    def watched(file, group):
        for batch in batches(file, group):
            found.append((group.number, len(batch)))
            yield batch

    monkeypatch.setattr(module, "_batches", watched)
    return found


def test_random_access_finds_the_right_row_in_small_and_large_row_groups(write, monkeypatch):
    rows = [{**GOOD, "context": f"text {i} " * 100} for i in range(40)]
    for size, window in ((1, 1), (7, 2**20), (40, 2**20), (40, 3000)):
        monkeypatch.setattr(module, "WINDOW_BYTES", window)
        samples = load_samples(write(*rows, row_group_size=size, use_dictionary=False))
        for i in (17, 3, 39, 4, 0, -1, 18, 5, -40):
            assert samples[i].context == rows[i]["context"]
        assert [sample.context for sample in samples[10:13]] == [row["context"] for row in rows[10:13]]
        for index in (40, -41):
            with pytest.raises(IndexError, match=f"sample {index} of 40"):
                samples[index]


def test_a_large_row_group_is_read_in_windows_of_which_two_are_kept(write, reads, monkeypatch):
    monkeypatch.setattr(module, "WINDOW_BYTES", 50_000)
    rows = [{**GOOD, "context": chr(97 + i % 26) * 10_000} for i in range(60)]
    samples = load_samples(write(*rows, use_dictionary=False, compression="none"))
    assert max(size for _, size in reads) <= 5
    held = []
    del reads[:]
    for i in range(60):
        assert samples[i].context == rows[i]["context"]
        held.append(sum(len(window.rows) for window in samples._windows))
    assert max(held) <= 10, "no more than two windows at once"
    assert sum(size for _, size in reads) == 60, "in order every row is read once"


def test_reading_in_order_decodes_each_row_group_once(write, reads):
    samples = load_samples(write(*[{**GOOD, "id": str(i)} for i in range(12)], row_group_size=4))
    del reads[:]
    assert [sample.id for sample in samples] == samples.ids
    assert reads == [(0, 4), (1, 4), (2, 4)]
    del reads[:]
    assert [samples[i].id for i in (8, 4, 9, 5, 8)] == ["8", "4", "9", "5", "8"]
    assert reads == [], "the last two stay"


def test_opening_leaves_nothing_of_the_documents_in_memory(write):
    samples = load_samples(write(*[{**GOOD, "context": "x" * 100_000}] * 20))
    assert len(samples._windows) == 0
    assert len(pickle.dumps(samples)) < 20_000


def test_samples_can_be_pickled_for_workers_while_they_are_read(write):
    samples = load_samples(write(GOOD, {**GOOD, "question": "When?"}))
    assert samples[0].question == "Who?"
    again = pickle.loads(pickle.dumps(samples))
    assert again[1].question == "When?" and again.ids == samples.ids


def test_a_file_that_changes_is_noticed(write):
    path = write(GOOD)
    samples = load_samples(path)
    write({**GOOD, "question": "Something else altogether?"})
    with pytest.raises(ValueError, match="changed while the run reads it"):
        samples[0]


def test_json_columns_are_known_by_their_mark_alone(write):
    text = json.dumps({"a": 1})
    marked = pa.field("marked", pa.string(), metadata={b"memrl": b"json"})
    fields = [("question", pa.string()), ("answers", pa.string()), ("context", pa.string()), ("plain", pa.string()), marked]
    row = {**GOOD, "answers": "Ed", "plain": text, "marked": text}
    assert ParquetSamples([write(row, schema=pa.schema(fields))])[0].metadata == {"plain": text, "marked": {"a": 1}}
