"""The report: rows read back, alignment of evidence, binning by depth, comparisons, and the folder that is written."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memrl.commands.report import Report
from memrl.evaluation.statistics import score_interval
from memrl.report import report_numbers as numbers
from memrl.report.rendering import escape_markdown
from memrl.report.report_pages import MAX_FAILURES, as_json, make_report, markdown, write_report
from memrl.report.retention import (
    evidence_chunk,
    is_traced,
    offsets,
    retained_shares,
    retention_at_end,
    retention_curve,
)
from memrl.report.series import Series, read_series
from memrl.scoring.scores import SCORES
from memrl.utils.pictures import length_name

PICTURES = [("accuracy.png", "Accuracy")]
REPO = Path(__file__).resolve().parent.parent


def make_row(**changes):
    score = changes.pop("score", 1.0)
    index = changes.get("index", 0)
    row = {
        **{"model": "tiny/model", "method": "memory", "task": "needle", "length": 4, "index": index, "repeat": 0},
        **{"id": f"needle-{index}", "question": f"question {index}", "answers": ["a"], "match": "any"},
        **{"response": "r", "answer": "a", "memory": "m", **dict.fromkeys(SCORES, score)},
        **{"chunks": 4, "tokens": 40, "prompt_tokens": 100, "response_tokens": 20, "seconds": 1.5, "peak_gib": 2.0},
        **{"depths": [0.3], "held": "0999", "chunk_tokens": 10, "error": None},
    }
    return row | changes


def write_folder(folder, rows, name="samples.jsonl", config=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "eval_config.json").write_text(json.dumps(config or {"methods": {}, "tasks": {"needle": "1"}}))
    return folder


def series_of(rows, label="x"):
    cells = {}
    for row in rows:
        cells.setdefault((row["task"], row["length"]), []).append(row)
    return Series(label, (Path("x"),), "x", "memory", cells)


# --- reading ------------------------------------------------------------------------------------------------


def test_duplicates_over_several_files_count_once_and_the_later_counts(tmp_path):
    write_folder(tmp_path / "a", [make_row(index=0, score=0.0), make_row(index=1), make_row(index=0, score=1.0)])
    write_folder(tmp_path / "a", [make_row(index=1, score=0.0), make_row(index=2)], "samples.rank1.jsonl")
    (one,) = read_series([tmp_path / "a"])
    assert [(row["index"], row["strict"]) for row in one.rows["needle", 4]] == [(0, 1.0), (1, 0.0), (2, 1.0)]


def test_repeats_and_methods_are_readings_of_their_own(tmp_path):
    rows = [make_row(repeat=1), make_row(repeat=0), make_row(repeat=0, method="retrieval")]
    memory, other = read_series([write_folder(tmp_path / "a", rows)])
    assert [row["repeat"] for row in memory.rows["needle", 4]] == [0, 1] and len(other.rows["needle", 4]) == 1


def test_a_failure_never_replaces_an_answer(tmp_path):
    failed = make_row(index=0, score=0.0, error="RuntimeError: x")
    for rows in ([failed, make_row(index=0)], [make_row(index=0), failed]):
        (one,) = read_series([write_folder(tmp_path / "a", rows)])
        assert [row["error"] for row in one.rows["needle", 4]] == [None]


def test_a_torn_last_line_is_left_out(tmp_path):
    folder = write_folder(tmp_path / "a", [make_row(index=0), make_row(index=1)])
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps(make_row(index=2))[:50])
    (one,) = read_series([folder])
    assert len(one.rows["needle", 4]) == 2


def test_each_method_is_a_series_and_labels_are_unique(tmp_path):
    rows = [make_row(), make_row(method="one_shot", held="")]
    first, second = write_folder(tmp_path / "a", rows), write_folder(tmp_path / "b", rows[:1])
    third = write_folder(tmp_path / "b" / "a", [make_row(model="model", method="retrieval")], config={"methods": {}, "tasks": {}})
    labels = [one.label for one in read_series([first, second, third])]
    assert labels == ["tiny/model memory (a)", "tiny/model one_shot", "tiny/model memory (b)", "model retrieval"]
    same_name = write_folder(tmp_path / "c" / "a", rows[:1])
    labels = [one.label for one in read_series([first, same_name])]
    assert labels[0] == f"tiny/model memory ({first.as_posix()})" and len(set(labels)) == 3


def configured(weights="w", versions=None, **methods):
    return {"model_path": "/m/tiny", "weights": weights, "methods": methods, "tasks": versions or {}}


def test_methods_are_in_the_order_of_the_settings(tmp_path):
    rows = [make_row(method=method) for method in ("retrieval", "one_shot", "memory")]
    config = configured(memory={"window": 1}, one_shot={}, retrieval={})
    found = read_series([write_folder(tmp_path / "a", rows, config=config)])
    assert [one.method for one in found] == ["memory", "one_shot", "retrieval"]


def test_folders_of_one_model_with_other_tasks_are_one_series(tmp_path):
    config = configured(memory={"chunk_tokens": 5})
    a = write_folder(tmp_path / "a", [make_row(task="vt")], config=config | {"tasks": {"vt": "1"}})
    b = write_folder(tmp_path / "b", [make_row(), make_row(length=8)], config=config | {"tasks": {"needle": "1"}})
    (one,) = read_series([a, b])
    assert (one.label, one.folders, one.versions) == ("tiny/model", (a, b), {"vt": "1", "needle": "1"})
    assert list(one.rows) == [("needle", 4), ("needle", 8), ("vt", 4)]


@pytest.mark.parametrize(
    "config, row",
    [
        (configured("other", memory={}), {"length": 8}),
        (configured(memory={"chunk_tokens": 9}), {"length": 8}),
        (configured(memory={}, versions={"needle": "2"}), {"length": 8}),
        (configured(memory={}) | {"decoding": {"temperature": 1.0}}, {"length": 8}),
        (configured(), {"length": 8}),  # the method's settings are unknown
        (configured(memory={}, versions={"needle": "1"}), {"length": 4}),  # the same cell
    ],
)
def test_folders_made_otherwise_or_with_a_common_cell_stay_apart(tmp_path, config, row):
    a = write_folder(tmp_path / "a", [make_row()], config=configured(memory={}, versions={"needle": "1"}))
    b = write_folder(tmp_path / "b", [make_row(**row)], config=config)
    assert [one.label for one in read_series([a, b])] == ["tiny/model (a)", "tiny/model (b)"]


def test_a_task_that_the_baseline_has_not_has_another_baseline_and_says_so(tmp_path):
    a = write_folder(tmp_path / "a", [make_row(model="a")])
    b = write_folder(tmp_path / "b", [make_row(model="b"), make_row(model="b", task="vt")])
    c = write_folder(tmp_path / "c", [make_row(model="c", task="vt", score=0.0)])
    report = make_report(read_series([a, b, c]), "lenient", None, (), {})
    text = markdown(report, PICTURES)
    assert "### needle against a\n" in text and "### vt against b\n\nWithout readings of vt by a, b takes its place." in text
    needle, vt = json.loads(as_json(report))["tasks"]
    assert (needle["baseline"], vt["baseline"], vt["differences"]["c"]["4"]["mean"]) == ("a", "b", -1.0)


def test_rows_are_in_order_whatever_the_order_of_the_lines(tmp_path):
    rows = [make_row(index=i, length=length) for length in (16, 4) for i in (2, 0, 1)] + [make_row(length="file")]
    (one,) = read_series([write_folder(tmp_path / "a", rows)])
    assert list(one.rows) == [("needle", 4), ("needle", 16), ("needle", "file")]
    assert [row["index"] for row in one.rows["needle", 4]] == [0, 1, 2]


def test_folders_without_rows_of_this_format_are_refused(tmp_path):
    folder = write_folder(tmp_path / "a", [make_row()])
    with pytest.raises(ValueError, match="there is no such folder"):
        read_series([tmp_path / "no"])
    with pytest.raises(ValueError, match=r"a is given twice"):
        read_series([folder, tmp_path / "b" / ".." / "a"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no samples\.jsonl"):
        read_series([tmp_path / "empty"])
    with pytest.raises(ValueError, match="holds no rows yet"):
        read_series([write_folder(tmp_path / "none", [])])
    old = make_row()
    del old["method"]
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 2 has no 'method': rows of an earlier format"):
        read_series([write_folder(tmp_path / "old", [make_row(), old])])
    with pytest.raises(ValueError, match=r"line 1 strict is 'yes'; `memrl eval` does not"):
        read_series([write_folder(tmp_path / "wrong", [make_row(strict="yes")])])


# --- retention ----------------------------------------------------------------------------------------------


def test_digits_become_shares_of_the_gold_answers():
    assert list(retained_shares(make_row(held="0999"))) == [0, 1, 1, 1]
    for n in range(1, 10):
        digits = "".join(str(9 * k // n) for k in range(n + 1))
        assert list(retained_shares(make_row(held=digits, answers=["a"] * n))) == [k / n for k in range(n + 1)]
    assert list(retained_shares(make_row(held="", answers=["a"]))) == []
    with pytest.raises(ValueError, match="one digit per chunk"):
        retained_shares(make_row(held="09x"))


@pytest.mark.parametrize(
    "depths, tokens, held, chunk",
    [
        ([0.0], 40, "9999", 0),
        ([0.3], 40, "0999", 1),  # token 12 of 40, 10 in a chunk
        ([0.999], 40, "0009", 3),
        ([1.0], 40, "0000", 3),
        ([0.3], 40, "0000", 1),
        ([0.1, 0.6], 40, "0000", 2),  # the last piece counts
        ([0.6, 0.1], 40, "0000", 2),
        ([0.5], 34, "0000", 1),  # the last chunk is a short one
        ([3 / 22], 220, "0" * 22, 3),  # 3 / 22 * 220 is below 30
        ([0.6], 40, "00", None),  # failed before it came there
        ([], 40, "0999", None),
        ([0.3], 40, "", None),
    ],
)
def test_the_chunk_of_the_evidence(depths, tokens, held, chunk):
    assert evidence_chunk(make_row(depths=depths, tokens=tokens, held=held)) == chunk


def test_within_the_error_of_a_depth_the_chunk_is_where_the_memory_gains_an_answer():
    assert evidence_chunk(make_row(depths=[0.49], held="0099")) == 2  # one chunk late
    assert evidence_chunk(make_row(depths=[0.51], held="0999")) == 1  # one chunk early
    assert evidence_chunk(make_row(depths=[0.1], held="0009")) == 0  # three chunks are no error of rounding
    two = "0" * 198 + "900" + "9" * 199  # of 400 chunks, with gains in 198 and 201
    assert evidence_chunk(make_row(tokens=4000, depths=[0.5], held=two)) == 201
    long = {"tokens": 40_960, "depths": [0.5]}  # 4,096 chunks: seven either way
    assert evidence_chunk(make_row(held="0" * 2054 + "9" * 2042, **long)) == 2054
    assert evidence_chunk(make_row(held="0" * 2056 + "9" * 2040, **long)) == 2048


def test_readings_are_aligned_by_their_evidence():
    rows = [
        make_row(depths=[0.0], held="9990"),  # held 0, 1, 2 chunks after, lost at 3
        make_row(depths=[0.3], held="0990"),  # held 0, 1 chunks after, lost at 2
        make_row(depths=[0.55], held="0000"),  # never noted
        make_row(depths=[0.8], held="0009"),  # read in the last chunk
        make_row(depths=[], held="9999"),  # at an unknown place
    ]
    found = [(point["after"], point["held"], point["n"]) for point in retention_curve(rows * 2)]
    assert found == [(0, 0.75, 8), (1, pytest.approx(2 / 3), 6)]  # beyond, fewer than MIN_READINGS go on
    found = [(point["after"], point["held"], point["n"]) for point in retention_curve(rows * 3)]
    assert found == [(0, 0.75, 12), (1, pytest.approx(2 / 3), 9), (2, 0.5, 6)]


def test_several_gold_answers_are_held_in_parts():
    row = make_row(answers=list("abcd"), held="2244", depths=[0.0, 0.3, 0.5, 0.6])
    assert [(point["after"], point["held"]) for point in retention_curve([row])] == [(0, 0.5), (1, 0.5)]


def test_offsets_are_powers_of_two_and_their_middles():
    assert offsets(0) == [0]
    assert offsets(20) == [0, 1, 2, 3, 4, 6, 8, 12, 16]
    assert offsets(4095)[-2:] == [2048, 3072] and len(offsets(4095)) == 24


def test_never_written_and_lost_are_counted_apart():
    rows = [make_row(held=held) for held in ("0999", "0990", "0000", "9000", "0009")]
    found = retention_at_end([*rows, make_row(held="", error="RuntimeError: x")])
    assert tuple(found.values()) == (pytest.approx(4 / 6), pytest.approx(2 / 6), 6)
    assert retention_at_end([make_row(held="")]) is None


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, True),
        ({"held": ""}, False),  # chunks were read without a record
        ({"held": "", "chunks": 0, "error": "RuntimeError: x"}, True),  # failed before its first chunk
        ({"answers": ["Yes."], "held": "0000"}, False),
        ({"answers": ["no", "Oslo"]}, True),
        ({"answers": [], "held": "", "chunks": 0, "error": "ValueError: x"}, True),
    ],
)
def test_a_reading_whose_answer_cannot_be_looked_for_is_not_traced(changes, expected):
    assert is_traced(make_row(**changes)) is expected


def test_questions_of_yes_and_no_are_left_out_of_retention_and_counted(tmp_path):
    rows = [make_row(index=0), make_row(index=1, answers=["yes"], score=0.0), make_row(index=2, answers=["no"], held="")]
    series = read_series([write_folder(tmp_path / "a", rows)])
    (task,) = make_report(series, "strict", None, (), {}).tasks
    label = series[0].label
    assert task.memory[label][4] == {"ever": 1.0, "last": 1.0, "n": 1}
    assert [point["n"] for point in task.retention[label][4]] == [
        1,
        1,
        1,
    ]
    assert task.answered[label][4].mean == 1.0 and task.untraced == {label: 2}
    assert task.left_out().startswith("left out: 2 of 3 readings")


# --- depth --------------------------------------------------------------------------------------------------


def test_depths_fall_into_tenths():
    assert [numbers.tenths([k / 10]) for k in range(11)] == [{min(k, 9)} for k in range(11)]
    assert numbers.tenths([0.0999, 0.05, 0.95]) == {0, 9}
    assert numbers.tenths([]) == set()


def test_scores_are_means_over_the_cell_and_empty_cells_have_none():
    rows = {
        4: [
            make_row(index=0, depths=[0.05]),
            make_row(index=1, depths=[0.09], score=0.0),
            make_row(index=2, depths=[0.31, 0.35, 0.95], score=0.5),
        ],
        8: [make_row(depths=[])],
    }
    found = numbers.depth_map(rows, "lenient")
    assert found.lengths == (4, 8)
    assert found.count[:, 0].tolist() == [2, 0, 0, 1, 0, 0, 0, 0, 0, 1] and not found.count[:, 1].any()
    assert found.score[[0, 3, 9], 0].tolist() == [0.5, 0.5, 0.5]
    assert np.isnan(found.score[1, 0]) and np.isnan(found.score[:, 1]).all()
    assert numbers.depth_map({8: rows[8]}, "lenient") is None


def test_a_sample_read_several_times_counts_once_in_its_cell():
    rows = [make_row(index=0, repeat=k, score=float(k < 1)) for k in range(4)] + [make_row(index=1)]
    found = numbers.depth_map({4: rows}, "strict")
    assert (found.count[3, 0], found.score[3, 0]) == (2, pytest.approx((1 / 4 + 1) / 2))


# --- numbers ------------------------------------------------------------------------------------------------


def test_repeats_are_averaged_before_anything_else():
    rows = [make_row(index=i, repeat=k, score=float(k <= i)) for i in range(3) for k in range(3)]
    found = numbers.score_of(rows, "strict")
    assert (found.mean, found.n, found.readings) == (pytest.approx(2 / 3), 3, 9)
    assert found.low == pytest.approx(1 / 3) and found.high == 1.0


def test_failures_and_empty_answers_are_counted_apart():
    rows = [
        make_row(index=0),
        make_row(index=1, score=0.0, answer=" "),
        make_row(index=2, score=0.0, answer="", error="RuntimeError: x"),
    ]
    found = numbers.score_of(rows, "strict")
    assert (found.mean, found.failures, found.empty) == (pytest.approx(1 / 3), 1, 1)


def test_the_interval_is_wilsons_for_0_and_1_and_never_of_no_width_for_one_value():
    assert score_interval([1.0] * 128)[0] == pytest.approx(128 / (128 + 1.96**2), abs=1e-4)
    assert score_interval([0.5]) == (0.0, 1.0)
    low, high = score_interval([0.25, 0.5, 0.75] * 40)
    assert 0.44 < low < 0.5 < high < 0.56


def test_the_average_needs_all_tasks_and_weighs_them_alike():
    rows = [make_row(task="vt", index=i, score=1.0) for i in range(8)] + [make_row(task="cwe", index=0, score=0.0)]
    rows += [make_row(task="vt", length=8)]
    found = numbers.average_of(series_of(rows), ["vt", "cwe"], "ruler")
    assert list(found) == [4] and (found[4].mean, found[4].n) == (0.5, 9)
    alike = [make_row(task=task, index=i, score=float(i % 2)) for task in ("vt", "cwe") for i in range(50)]
    score = numbers.average_of(series_of(alike), ["vt", "cwe"], "ruler")[4]
    assert score.high - score.low == pytest.approx(2 * 1.96 * np.sqrt(0.25 / 100), rel=0.08)  # independent over tasks
    right = numbers.average_of(series_of([row | {"ruler": 1.0} for row in alike]), ["vt", "cwe"], "ruler")[4]
    assert right.low < 1.0 == right.high


def test_series_are_compared_on_the_samples_that_both_have():
    base = [make_row(index=i, score=0.0) for i in range(4)]
    mine = [make_row(index=i, score=1.0) for i in (1, 2, 3, 9)]
    mine[2]["question"] = "another one"
    found = numbers.compare(series_of(mine), series_of(base), ("needle", 4), "strict")
    assert (found.mean, found.n, found.p_value) == (1.0, 2, 0.5)
    assert found.low < 1.0  # Agresti and Min's: two samples prove little
    assert numbers.compare(series_of(mine), series_of(base), ("needle", 8), "strict") is None


def test_a_document_that_could_not_be_made_is_a_lost_comparison():
    base = [make_row(index=i, score=1.0) for i in range(4)]
    failed = make_row(index=3, score=0.0, question="", answers=[], error="ValueError: x")
    found = numbers.compare(series_of([*base[:3], failed]), series_of(base), ("needle", 4), "strict")
    assert (found.mean, found.n) == (-0.25, 4)


def test_costs_are_means_and_the_highest_peak():
    found = numbers.cost_of([make_row(seconds=1.0, peak_gib=None), make_row(seconds=3.0, peak_gib=5.5)])
    assert found == {"readings": 2, "seconds": 2.0, "prompt_tokens": 100.0, "response_tokens": 20.0, "peak_gib": 5.5}
    assert numbers.cost_of([make_row(peak_gib=None)])["peak_gib"] is None


def test_lengths_are_short_where_that_is_exact():
    given = [1, 512, 1024, 1536, 2048, 4096, 98304, 25600, 1048576, 1048577, 3 * 1048576]
    assert [length_name(length) for length in given] == "1 512 1K 1536 2K 4K 96K 25600 1M 1048577 3M".split()


@pytest.mark.parametrize(
    "text, escaped",
    [
        ("x | y\nz", r"x \| y z"),
        ("<img src=x> & <b>", "&lt;img src=x&gt; &amp; &lt;b&gt;"),
        ("[a](b) `c` *d* ~e~", r"\[a\](b) \`c\` \*d\* \~e\~"),
        ("my_model __init__ _x_", r"my_model \_\_init\_\_ \_x\_"),
        (r"\frac{1}{2}", r"\\frac{1}{2}"),
    ],
)
def test_text_is_shown_unchanged_by_markdown_and_stays_in_its_cell(text, escaped):
    assert escape_markdown(text) == escaped


def test_a_long_list_of_failures_is_cut_and_says_so():
    rows = [make_row(index=k, score=0.0, error=f"r{k}") for k in range(MAX_FAILURES + 3)]
    text = markdown(make_report([series_of(rows)], "strict", None, (), {}), PICTURES)
    assert "and 3 more kinds" in text and "| r19 |" in text and "| r20 |" not in text


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    rng = np.random.default_rng(0)
    base, other = [], []
    for length in (1, 16, 4096):
        for index in range(6):
            depth = float(rng.random())
            row = make_row(length=length, index=index, chunks=length, tokens=10 * length, depths=[depth])
            base.append({**row, "held": "0" * int(depth * length) + "9" * (length - int(depth * length))})
            other.append({**row, "method": "one_shot", "held": "", **dict.fromkeys(SCORES, float(index % 2))})
    base.append(make_row(task="my file.v2", length="file", depths=[], score=0.0, error="RuntimeError: no | memory"))
    base += [make_row(task=task, length=8192, index=i, depths=[], held="") for task in ("vt", "qa_1") for i in range(2)]
    return write_folder(root / "a", base), write_folder(root / "b", other, config={"methods": {}, "tasks": {"needle": "2"}})


@pytest.fixture(scope="module")
def written(folders, tmp_path_factory):
    """The folder of a report of both results folders, and what the command printed."""
    out, printed = tmp_path_factory.mktemp("report") / "out", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert Report.main([*map(str, folders), "--out", str(out), "--score", "strict"]) == 0
    return out, printed.getvalue()


def test_the_command_writes_tables_pictures_and_numbers(written):
    out, printed = written
    names = sorted(path.name for path in out.iterdir())
    pictures = "accuracy_by_length.png depth_needle.png retention_my_file.v2.png retention_needle.png"
    assert names == sorted(["report.json", "report.md", *pictures.split()])
    assert sorted(Path(line).name for line in printed.splitlines()) == names
    text = (out / "report.md").read_text()
    assert all(f"]({name})" in text for name in pictures.split())
    assert "**100.0** [61.0, 100.0] n 6 |" in text and "**0.0** [0.0, 79.3] n 1, 1 failed" in text
    assert "**-50.0** [" in text and "p 0.250, n 6" in text
    assert "Averaged: vt, qa_1" in text or "Averaged: qa_1, vt" in text
    assert "RuntimeError: no \\| memory" in text and "its needle has another version" in text
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in pictures.split())
    found = json.loads((out / "report.json").read_text())
    assert [one["label"] for one in found["series"]] == ["tiny/model memory", "tiny/model one_shot"]
    assert "are to be compared with `--score ruler`, not with strict" in text and "can disagree at the edge" in text
    needle = next(task for task in found["tasks"] if task["task"] == "needle")
    assert needle["memory"]["tiny/model memory"]["4096"] == {"ever": 1.0, "last": 1.0, "n": 6}
    assert needle["differences"]["tiny/model one_shot"]["16"]["mean"] == -0.5


def test_the_same_rows_give_the_same_bytes(folders, written, tmp_path):
    out, _ = written
    assert Report.main([*map(str, folders), "--out", str(tmp_path / "again"), "--score", "strict"]) == 0
    assert {path.name for path in out.iterdir()} == {path.name for path in (tmp_path / "again").iterdir()}
    for path in out.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_formulas_and_tags_in_names_are_shown_as_they_are(tmp_path):
    rows = [make_row(index=index, error=f"<script>{index}") for index in range(2)]
    hostile = series_of(rows, r"$\frac{$ <img src=x> | **b**"), series_of([make_row(task="$x_$", length="$z^$")], "$y^$")
    assert len(write_report(make_report(hostile, "strict", None, (), {}), tmp_path)) == 7
    text = (tmp_path / "report.md").read_text()
    assert "<img" not in text and "<script" not in text and r"\$\\frac{\$ &lt;img src=x&gt; \| \*\*b\*\*" in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["NO", "--out", "OUT"], "there is no such folder"),
        (["A", "--out", "OUT", "--baseline", "x"], "baseline is 'x', and the series are 'tiny/model'; give one of them"),
        (["A", "--out", "A/samples.jsonl"], "is not a folder"),
        (["A", "--out", "OUT", "--score", "best"], "invalid choice: 'best'"),
        (["A"], "required: out"),
        (["--out", "OUT"], "required: folders"),
    ],
)
def test_mistakes_are_one_line_and_code_2(folders, tmp_path, capsys, arguments, message):
    places = {"A": str(folders[0]), "OUT": str(tmp_path / "out"), "NO": str(tmp_path / "no")}
    for name, path in places.items():
        arguments = [path + part[len(name) :] if part == name or part.startswith(name + "/") else part for part in arguments]
    with pytest.raises(SystemExit) as end:
        Report.main(arguments)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and message in error


def test_help_is_quick_and_names_the_scores():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "memrl", "report", "--help"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "{strict,lenient,exact,f1,ruler}" in done.stdout and "95% intervals" in " ".join(done.stdout.split())
    assert "matplotlib" not in done.stderr and "jinja2" not in done.stderr
