"""Damaged and hostile results, metrics, rollouts and eval options: one line and exit code 2, or a report; never a traceback."""

import contextlib
import io
import json
import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memrl.commands.check_dataset import Check
from memrl.commands.report import Curves, Report, Trace
from memrl.evaluation import runner
from memrl.evaluation.model_under_test import check_options
from memrl.evaluation.options import Options
from memrl.evaluation.results import Results, read_config
from memrl.evaluation.row_check import check_row
from memrl.evaluation.runner import all_keys
from memrl.evaluation.tasks import parse_lengths
from memrl.reading.open_model import ReaderOptions
from memrl.report.rendering import escape_markdown
from memrl.report.series import read_series
from memrl.utils import pictures
from tests.test_report import make_row, write_folder

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DIGITS = "9" * 400
ESCAPE = "\x1b[2J"
ROLLOUT = {"step": 1, "question": "q", "answers": ["a"], "reward": 1.0, "scores": {"strict": 1.0}, "group_rewards": [1.0, 0.0]}
ROLLOUT |= {"turns": [{"kind": "memory", "response": "a", "prompt": "p"}, {"kind": "answer", "response": "a"}]}
METRICS = {"step": 1, "reward/strict": 0.5, "loss/kl": 0.1, "optim/grad_norm": 1.0}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([ESCAPE, "$\\frac{", "\ud800", "_x", "any", "all", "memory", 10**15, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def run(main, *arguments) -> tuple[int, str]:
    """Exit code and standard error of a command; anything but an ordinary end is raised."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main([str(argument) for argument in arguments], "memrl")
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, errors.getvalue()


def check_end(code: int, errors: str) -> None:
    assert code in (0, 2), (code, errors)
    assert ESCAPE not in errors and (code == 0 or (errors.count("\n") == 1 and errors.startswith("error: "))), errors


# --- files -----------------------------------------------------------------------------------------------------------------


LINES = {
    "no object": b"[1]\n",
    "no JSON": b"{]\n",
    "not UTF-8": b'{"step": "\xff"}\n',
    "deep": b'{"step": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n",
    "deep enough to parse": b'{"step": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}\n",
    "long number": b'{"step": ' + DIGITS.encode() + b"}\n",
    "long number elsewhere": b'{"step": 1, "loss/kl": ' + DIGITS.encode() + b"}\n",
    "infinite": b'{"step": 1, "loss/kl": 1e999, "optim/grad_norm": NaN}\n',
    "long line": b'{"step": 1, "x": "' + b"x" * 5_000_000 + b'"}\n',
    "escapes": json.dumps({ESCAPE: 1}).encode() + b"\n",
}


@pytest.mark.parametrize("name", LINES)
def test_damaged_lines_end_in_one_line(tmp_path, name):
    (tmp_path / "metrics.jsonl").write_bytes(LINES[name])
    check_end(*run(Curves.main, tmp_path))
    (tmp_path / "rollouts.jsonl").write_bytes(LINES[name] + json.dumps(ROLLOUT).encode() + b"\n")
    code, errors = run(Trace.main, tmp_path / "rollouts.jsonl", "--out", tmp_path / "x.html")
    check_end(code, errors)
    folder = write_folder(tmp_path / "results", [])
    (folder / "samples.jsonl").write_bytes(LINES[name] + b"\n")
    code, errors = run(Report.main, folder, "--out", tmp_path / "out")
    check_end(code, errors)
    assert code == 2 and not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="line 1 is damaged"):
        Results(folder, json.loads((folder / "eval_config.json").read_text()))


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"[]", b"3", b"\xff", b'{"methods": [], "tasks": {}}', b'{"methods": {}}', b""]
)
def test_settings_of_another_shape_end_in_one_line(tmp_path, content):
    folder = write_folder(tmp_path / "results", [make_row()])
    (folder / "eval_config.json").write_bytes(content)
    code, errors = run(Report.main, folder, "--out", tmp_path / "out")
    check_end(code, errors)
    assert code == 2 and "eval_config.json is damaged" in errors
    with pytest.raises(ValueError, match=r"eval_config.json is damaged"):
        Results(folder, {})


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(
            (name, value)
            for name in ("strict", "seconds", "tokens")
            for value in (float("nan"), float("inf"), -1, 10**300, "1", True)
        ),
        ("strict", 1.5),
        ("index", 0.0),
        ("length", 0),
        ("length", True),
        ("answers", "a"),
        ("answers", [1]),
        ("depths", [2.0]),
        ("held", "a9"),
        ("error", 3),
        ("id", None),
        ("question", {}),
    ],
)
def test_a_column_of_another_kind_is_named(column, value):
    check_row(make_row())
    with pytest.raises(ValueError, match=f"^{column} is .*; `memrl eval` does not write that"):
        check_row(make_row(**{column: value}))


@QUICK
@given(st.dictionaries(st.sampled_from(sorted(make_row())), json_values, min_size=1, max_size=2), json_values)
def test_any_row_is_refused_or_reported(tmp_path_factory, changes, config):
    folder = tmp_path_factory.mktemp("fuzz")
    write_folder(folder, [make_row(), make_row(index=1) | changes])
    if isinstance(config, dict):
        (folder / "eval_config.json").write_text(json.dumps({"methods": {"memory": config}, "tasks": {"needle": config}}))
    with contextlib.suppress(ValueError):
        from memrl.report.report_numbers import make_report
        from memrl.report.report_pages import as_json, markdown

        report = make_report(read_series([folder]), "lenient", None, (), {})
        as_json(report)
        assert ESCAPE not in markdown(report, [("a.png", "a")])
    with contextlib.suppress(ValueError):
        Results(folder, read_config(folder)).close()


@settings(QUICK, max_examples=20)
@given(st.dictionaries(st.sampled_from([*ROLLOUT, "rollout", "error", "match", "group"]), json_values, min_size=1, max_size=3))
def test_any_rollout_is_refused_or_shown(tmp_path_factory, changes):
    path = tmp_path_factory.mktemp("fuzz") / "rollouts.jsonl"
    path.write_text(json.dumps(ROLLOUT | changes) + "\n")
    check_end(*run(Trace.main, path, "--out", path.with_name("x.html")))


@QUICK
@given(st.dictionaries(st.sampled_from([*METRICS, "x"]), json_values, min_size=1, max_size=3))
def test_any_metrics_are_refused_or_read(tmp_path_factory, changes):
    from memrl.report.curves import _drawable, read_curves

    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "metrics.jsonl").write_text(json.dumps(METRICS) + "\n" + json.dumps(METRICS | changes) + "\n")
    with contextlib.suppress(ValueError):
        run = read_curves(folder)
        assert all(isinstance(_drawable(run, name), bool) for name in run.series)


def test_pipes_and_devices_in_the_place_of_files_are_refused_at_once(tmp_path):
    folder = write_folder(tmp_path / "results", [make_row()])
    for name in ("metrics.jsonl", "results/samples.rank1.jsonl"):
        os.mkfifo(tmp_path / name)
    for main, *arguments in (
        (Curves.main, tmp_path),
        (Trace.main, tmp_path / "metrics.jsonl", "--out", tmp_path / "x.html"),
        (Trace.main, "/dev/zero", "--out", tmp_path / "x.html"),
        (Report.main, folder, "--out", tmp_path / "out"),
    ):
        code, errors = run(main, *arguments)
        check_end(code, errors)
        assert code == 2 and "pipe or a device" in errors


# --- names -----------------------------------------------------------------------------------------------------------------


NAMES = ["$\\frac{", "$", "a\nb", ESCAPE, "x" * 2**20, "_hidden", "\ud800", "<img src=x>", "| a |", "北京", "\\$"]


def test_any_name_stays_one_line_of_text_in_pictures_and_tables(tmp_path):
    from memrl.report.report_numbers import make_report
    from memrl.report.report_pages import write_report

    rows = [make_row(model=name, id=name, error=name, length=name[:300], held="", depths=[]) for name in NAMES]
    rows = [row for row in rows if row["model"] != "\ud800"]
    rows += [make_row(task=name, length="x") for name in ("x" * 1000, "a/b$", "a b$")]
    folder = write_folder(tmp_path / "results", rows)
    written = write_report(make_report(read_series([folder]), "strict", None, (), {}), tmp_path / "out")
    assert len(set(written)) == len(written) == len(list((tmp_path / "out").iterdir()))
    text = (tmp_path / "out" / "report.md").read_text()
    assert "<img" not in text and ESCAPE not in text and "x" * 600 not in text and r"\$\\frac{" in text
    for name in NAMES:
        shown = pictures.literal(name)
        assert len(shown) <= 2 * pictures.LONGEST_NAME and "\n" not in shown and not shown.startswith("_")
        assert "\n" not in escape_markdown(name)
    run_dir = tmp_path / "$\\frac{ _x"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text(json.dumps(METRICS) + "\n")
    check_end(*run(Curves.main, run_dir))


def test_a_label_is_kept_and_one_that_is_no_line_is_refused(tmp_path):
    for label in ("model", "best", "$\\frac{", "a/b", "北京"):
        check_options(Options("m", label=label), ReaderOptions())
        (one,) = read_series([write_folder(tmp_path / "results", [make_row(model=label)])])
        assert one.label == one.model == label
    for label in ("", " ", "a\nb", ESCAPE, "x" * 300):
        with pytest.raises(ValueError, match="give one line of at most 200 characters"):
            check_options(Options("m", label=label), ReaderOptions())


def test_data_check_prints_escapes_as_text(tmp_path, capsys):
    path = tmp_path / "in.jsonl"
    row = {"id": ESCAPE, "question": f"{ESCAPE}q\x9b2J\u202e", "answers": [ESCAPE], "context": f"a {ESCAPE} b", ESCAPE: 1}
    path.write_text(json.dumps(row) + "\n")
    assert Check.main([str(path)], "memrl") == 0
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x9b", "\u202e"} & set(printed) and printed.count("\\x1b[2J") == 5
    path.write_text(json.dumps(row | {"answers": ESCAPE, "match": ESCAPE}) + "\n")
    check_end(*run(Check.main, path))


# --- options ---------------------------------------------------------------------------------------------------------------


class AnyTask:
    name = "t"

    def count(self, length, wanted):
        return wanted


@pytest.mark.parametrize("samples", [10**29, 10**7, runner.MOST_READINGS // 2 + 1])
def test_readings_without_end_are_refused_before_they_are_listed(samples):
    with pytest.raises(ValueError, match="lower --samples"):
        all_keys([AnyTask()], {"t": [1, 2]}, samples, ["memory"])
    assert len(all_keys([AnyTask()], {"t": [1, 2]}, 3, ["memory", "one_shot"], 2)) == 24


def test_lengths_without_end_are_refused_at_once():
    for text in ("1e29", "-1", DIGITS, ",".join(map(str, range(1, 1_000_001))), "1," * 10**6, ESCAPE):
        with pytest.raises(ValueError, match="lengths holds") as refused:
            parse_lengths(text)
        assert len(str(refused.value)) < 200
    given_lengths = random.Random(0).sample(range(1, 10**6), 1000)
    assert parse_lengths(",".join(map(str, given_lengths))) == sorted(given_lengths)
