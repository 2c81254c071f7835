"""Evaluation: the same rows in any batch and after any interruption, failures counted, numbers that are what they say."""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memrl.agents.settings import load_agent
from memrl.evaluation import (
    Results,
    evaluate,
    parse_lengths,
    print_table,
    summarize,
    wilson_interval,
    write_summary,
)
from memrl.evaluation.plot import plot_accuracy
from memrl.evaluation.runner import row_key
from memrl.runtime import ReaderOptions, load_settings, open_llm, pick_device
from memrl.types import Sample
from tests.tiny_folder import WORDS, make_folder

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "name ?"


class WordTask:
    """Documents of random words, `length` chunks of eight; question 3 is too long for its cap."""

    name, length_unit, default_lengths, version = "words", "chunks", (1, 2), "1"

    def __init__(self):
        self.made = []

    def count(self, length, wanted):
        return 6 if wanted is None else wanted

    def sample(self, length, index, seed):
        self.made.append((length, index))
        rng = random.Random(f"{seed} {length} {index}")
        question = "who ? " * 9 if index == 3 else QUESTION
        words = rng.choices(WORDS, k=8 * length)
        return Sample(f"w{length}-{index}", question, " ".join(words), (words[0],))

    def num_chunks(self, length, count):
        return length * count


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("evaluation") / "model")


@pytest.fixture(scope="module")
def open_with(folder):
    """open_with(max_rows=..., ...) -> (llm, agent)"""

    def open_with(**options):
        reader = ReaderOptions(**{"temperature": 1.0, "device": "cpu", **options})
        agent, tokenizer = load_settings(folder, reader)
        return open_llm(folder, tokenizer, agent, reader), agent

    return open_with


@pytest.fixture(scope="module")
def rows(open_with):
    llm, agent = open_with(max_rows=16)
    return evaluate(llm, WordTask(), [1, 3], 6, agent, seed=7)


def test_rows_come_in_order_with_what_was_read(rows):
    assert [(row["length"], row["index"]) for row in rows] == [(n, i) for n in (1, 3) for i in range(6)]
    for row in rows:
        if row["index"] != 3:
            assert (row["chunks"], row["tokens"], row["error"]) == (row["length"], 8 * row["length"], None)
    assert len({row["response"] for row in rows}) > 4  # sampled at temperature 1: otherwise the tests below prove little


def test_results_do_not_depend_on_the_batch(rows, open_with):
    for max_rows in (1, 3):
        llm, agent = open_with(max_rows=max_rows)
        assert evaluate(llm, WordTask(), [1, 3], 6, agent, seed=7) == rows
    llm, agent = open_with()
    assert evaluate(llm, WordTask(), [3], 2, agent, seed=7) == rows[6:8]


def test_shards_are_together_all_of_it(rows, open_with):
    llm, agent = open_with()
    parts = [evaluate(llm, WordTask(), [1, 3], 6, agent, 7, shard=(rank, 3)) for rank in range(3)]
    assert sorted((row for part in parts for row in part), key=row_key) == rows


def test_finished_documents_are_not_even_made(rows, open_with):
    llm, agent = open_with()
    task = WordTask()
    done = {row_key(row) for row in rows[:-2]}
    assert evaluate(llm, task, [1, 3], 6, agent, 7, done=done) == rows[-2:]
    assert sorted(task.made) == [(3, 4), (3, 5)]


def test_documents_are_made_only_as_rows_have_room(open_with):
    llm, agent = open_with(max_rows=2)
    task, finished, most_open = WordTask(), 0, 0

    def on_result(row):
        nonlocal finished, most_open
        most_open = max(most_open, len(task.made) - finished)
        finished += 1

    evaluate(llm, task, [2], 20, agent, 0, on_result=on_result)
    assert (finished, most_open) == (20, 2)


def test_failures_are_wrong_answers_and_never_dropped(rows):
    failed = [row for row in rows if row["error"]]
    assert [row["index"] for row in failed] == [3, 3]
    assert failed[0]["error"].startswith("ValueError: the question has 18 tokens")
    assert failed[0]["strict"] == failed[0]["lenient"] == failed[0]["f1"] == 0.0
    summary = summarize([{**row, "strict": 0.0 if row["error"] else 1.0} for row in rows])
    assert [(entry["n"], entry["failures"]) for entry in summary] == [(6, 1), (6, 1)]
    assert summary[0]["strict"] == pytest.approx(5 / 6)
    assert summary[0]["strict_interval"] == list(wilson_interval(5, 6))


def test_broken_results_file_ends_the_run_at_once(open_with):
    llm, agent = open_with(max_rows=1)
    calls = []

    def full_disk(row):
        calls.append(row)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        evaluate(llm, WordTask(), [1], 6, agent, 0, on_result=full_disk)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # The first two are Newcombe's (Statistics in Medicine 17, 1998, table I); the others from the closed forms.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (10, 10, 0.7225, 1.0),
    ],
)
def test_wilson_interval_has_the_published_values(successes, trials, low, high):
    assert wilson_interval(successes, trials) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_lengths():
    assert parse_lengths("16, 1,4") == [1, 4, 16]
    assert parse_lengths("8k,1M,100") == [100, 8192, 1048576]
    for bad in ("", "1,", "0", "-4", "4,4", "8k,8192", "1.5", "x", "1e3", "4 8", "k"):
        with pytest.raises(ValueError, match="lengths"):
            parse_lengths(bad)


def test_table_and_summary_file(tmp_path, capsys, rows):
    summary = summarize(rows)
    print_table(summary, {"words": "chunks"})
    printed = capsys.readouterr().out
    assert "3 chunks" in printed and max(map(len, printed.splitlines())) <= 120
    write_summary(summary, tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert {"task", "length", "method", "n", "failures", "strict", "lenient", "f1"} <= set(summary[0])


def test_plot_is_written_and_needs_lengths(tmp_path):
    entry = {"strict": 0.5, "strict_interval": [0.4, 0.6], "lenient": 0.5, "lenient_interval": [0.4, 0.6]}
    series = {name: [{**entry, "length": n} for n in (1, 4, 8192)] for name in ("before RL", "after RL")}
    plot_accuracy(tmp_path / "plot.png", series, trained_to=4)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_accuracy(tmp_path / "none.png", {"a": [{**entry, "length": "file"}]})


# --- the results folder ----------------------------------------------------------------------------------------------------

SETTINGS = {
    "weights": "abc",
    "agent": {"chunk_tokens": 5},
    "seed": 0,
    "model_path": "m",
    "tasks": {"words": "1"},
}


def test_torn_last_line_is_repaired_and_the_others_are_kept(tmp_path, rows):
    with Results(tmp_path, SETTINGS) as results:
        for row in rows[:3]:
            results.add(row)
    path = tmp_path / "samples.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with Results(tmp_path, SETTINGS) as results:
        assert list(results.rows.values()) == rows[:2]
        results.add(rows[2])
    assert path.read_bytes() == whole


def test_other_settings_are_refused_naming_them(tmp_path, rows):
    with Results(tmp_path, SETTINGS) as results:
        results.add(rows[0])
    for changed, named in (
        ({"agent": {"chunk_tokens": 6}}, r"agent\.chunk_tokens \(5 there, 6 now\)"),
        ({"seed": 1, "weights": "x"}, r"seed .*weights"),
        ({"tasks": {"words": "2"}}, r"tasks\.words"),
    ):
        with pytest.raises(ValueError, match=named):
            Results(tmp_path, SETTINGS | changed)
    with pytest.raises(ValueError, match="already holds results"):
        Results(tmp_path, SETTINGS, resume=False)
    with Results(tmp_path, SETTINGS | {"model_path": "moved", "tasks": {"other": "1"}}) as results:
        assert len(results.rows) == 1
    assert json.loads((tmp_path / "eval_config.json").read_text())["tasks"] == {"words": "1", "other": "1"}


def test_damaged_line_in_the_middle_is_named(tmp_path, rows):
    with Results(tmp_path, SETTINGS) as results:
        results.add(rows[0])
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b"{]\n" + path.read_bytes())
    with pytest.raises(ValueError, match="line 1 is damaged"):
        Results(tmp_path, SETTINGS)


def test_two_processes_do_not_write_into_one_folder(tmp_path):
    pytest.importorskip("fcntl")
    with Results(tmp_path, SETTINGS), pytest.raises(ValueError, match="another process"):
        Results(tmp_path, SETTINGS)
    Results(tmp_path, SETTINGS).__exit__()


# --- the command -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """A JSON lines file of 60 documents of up to 40 chunks, one of which cannot be read."""
    path = tmp_path_factory.mktemp("questions") / "qa.jsonl"
    rng = random.Random(0)
    with path.open("w") as file:
        for index in range(60):
            context = " ".join(rng.choices(WORDS, k=rng.randint(1, 320)))
            question = "who ? " * 9 if index == 5 else QUESTION
            line = {
                "id": f"q{index}",
                "question": question,
                "context": context,
                "answers": [rng.choice(WORDS)],
            }
            file.write(json.dumps(line) + "\n")
    return path


def run_main(capsys, *arguments) -> tuple[int, str, list[str]]:
    """eval.py's main in this process: exit code, standard output, lines on standard error."""
    try:
        code = importlib.import_module("eval").main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


def rows_in(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def test_killed_command_continues_with_the_same_rows(folder, questions, tmp_path, capsys):
    options = ["--model", folder, "--task", questions, "--temperature", 1, "--max_rows", 2, "--device", "cpu"]
    code, printed, _ = run_main(capsys, *options, "--out", tmp_path / "whole")
    assert code == 0 and "failed: qa, length file, sample q5: ValueError" in printed

    out = tmp_path / "killed"
    command = [sys.executable, ROOT / "eval.py", *options, "--out", out, "--threads", 1]
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    samples = out / "samples.jsonl"
    deadline = time.monotonic() + 60
    while not (samples.exists() and samples.read_bytes().count(b"\n") >= 5) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = samples.read_bytes().count(b"\n")
    assert 5 <= before < 60
    samples.write_bytes(samples.read_bytes() + b'{"task": "qa", "len')

    code, printed, _ = run_main(capsys, *options, "--out", out)
    assert code == 0 and f"{60 - before} documents" in printed
    assert sorted(rows_in(out), key=row_key) == sorted(rows_in(tmp_path / "whole"), key=row_key)
    assert (out / "summary.json").read_text() == (tmp_path / "whole" / "summary.json").read_text()

    content = samples.read_bytes()
    code, printed, errors = run_main(capsys, *options, "--out", out)
    assert code == 0 and "results:" in printed and "documents" not in printed and errors == []
    assert samples.read_bytes() == content
    code, _, errors = run_main(capsys, *options, "--out", out, "--agent.chunk_tokens", 9)
    assert code == 2 and len(errors) == 1 and "agent.chunk_tokens (8 there, 9 now)" in errors[0]


def test_mistakes_are_one_line_and_exit_code_2(folder, questions, tmp_path, capsys):
    good = ["--model", folder, "--task", questions, "--out", tmp_path / "out"]
    for arguments, named in (
        ([], "model"),
        (["--model", tmp_path / "nowhere"], "nowhere"),
        ([*good, "--lengths", "4"], "lengths"),
        ([*good, "--samples", "0"], "samples"),
        ([*good, "--smples", "3"], "smples"),
        ([*good, "--seed", "x"], "seed"),
        ([*good, "--max_rows", "0"], "max_rows"),
        ([*good, "--top_p", "0"], "top_p"),
        ([*good, "--device", "tpu"], "device"),
        ([*good, "--device", "cuda:99"], "device"),
        ([*good, "--agent.chunk_tokens", "-1"], "chunk_tokens"),
        ([*good, "--agent.prompts", "nonsense"], "nonsense"),
        ([*good, "--out", questions], "folder"),
        (["--model", folder, "--task", "no_such_task"], "no_such_task"),
        (["--model", folder, "--task", f"{questions},{questions}"], "two tasks"),
        (["--model", folder, "--task", tmp_path / "none.jsonl"], "none.jsonl"),
        (["--model", folder, "--lengths", "4,4"], "twice"),
        (["--model", folder, "--lengths", "0"], "lengths"),
        (["--model", folder, "--lengths", ""], "lengths"),
    ):
        code, printed, errors = run_main(capsys, *arguments)
        assert (code, len(errors), printed) == (2, 1, ""), (arguments, errors)
        assert named in errors[0], (arguments, errors)


def test_device_that_is_not_there_is_named():
    import torch

    assert pick_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        assert pick_device("auto").type == "cpu"
        with pytest.raises(ValueError, match="finds no GPU"):
            pick_device("cuda")
    with pytest.raises(ValueError, match="allowed are"):
        pick_device("gpu")


def test_help_needs_neither_torch_nor_transformers():
    code = """import sys
for name in ("eval", "infer"):
    try:
        __import__(name).main(["--help"])
    except SystemExit:
        print("torch" in sys.modules, "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert [line for line in done.stdout.splitlines() if line[:5] in ("True ", "False")] == ["False False"] * 2
    assert "--lengths" in done.stdout and "--trace" in done.stdout


def test_agent_settings_of_the_folder_are_used(folder, open_with):
    _, agent = open_with()
    assert agent == load_agent(folder) and agent.chunk_tokens == 8
