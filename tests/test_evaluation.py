"""Evaluation: the same rows in any batch and after any interruption, failures counted, numbers that are what they say."""

import json
import random
from pathlib import Path

import pytest

from memrl.agents.settings import load_agent
from memrl.evaluation import (
    Results,
    evaluate,
    make_task,
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


def test_needle_documents_have_the_length_that_was_asked_for(request):
    from memrl.agents import AgentConfig
    from memrl.data.needle import build_tokenizer, make_sample
    from memrl.prompts import load_prompts
    from memrl.tokenizer import Tokenizer, load_tokenizer

    prompts = load_prompts("question_first")
    tokenizer = Tokenizer(build_tokenizer())
    task = make_task("needle", tokenizer, AgentConfig(prompts, chunk_tokens=25))
    for length in (1, 7, 512):
        sample = task.sample(length, 0, 0)
        assert len(tokenizer.encode(sample.context)) == 25 * length
        assert sample == make_sample(length, int(sample.id.split("-")[-1]))
        assert sample == task.sample(length, 0, 0) != task.sample(length, 1, 0)

    tokenizer = load_tokenizer(request.getfixturevalue("shared_data") / "tokenizer" / "qwen2.5-instruct")
    task = make_task("needle", tokenizer, AgentConfig(prompts, chunk_tokens=1000))
    for length in (1, 4, 16):
        for index in range(5):
            num_tokens = len(tokenizer.encode(task.sample(length, index, 0).context))
            assert -(-num_tokens // 1000) == length


def test_table_and_summary_file(tmp_path, capsys, rows):
    summary = summarize(rows)
    print_table(summary, {"words": "chunks"})
    printed = capsys.readouterr().out
    assert "length (chunks)" in printed and max(map(len, printed.splitlines())) <= 120
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


def test_last_row_of_a_key_counts_and_failures_are_not_finished(tmp_path, rows):
    key, failed = row_key(rows[0]), {**rows[0], "error": "RuntimeError: out of memory"}
    with Results(tmp_path, SETTINGS) as results:
        for row in (failed, rows[1], failed):  # the same failure again is not written again
            results.add(row)
        assert results.finished == {row_key(rows[1])}
    with Results(tmp_path, SETTINGS) as results:
        assert (results.finished, results.rows[key]) == ({row_key(rows[1])}, failed)
        results.add(rows[0])
    with Results(tmp_path, SETTINGS) as results:
        assert results.finished == {key, row_key(rows[1])}
        assert results.rows == {key: rows[0], row_key(rows[1]): rows[1]}
    assert (tmp_path / "samples.jsonl").read_bytes().count(b"\n") == 3


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
    Results(tmp_path, SETTINGS).close()


def test_settings_without_rows_bind_nobody(tmp_path):
    Results(tmp_path, SETTINGS).close()
    Results(tmp_path, SETTINGS | {"weights": "repaired"}, resume=False).close()


def test_device_that_is_not_there_is_named():
    import torch

    assert pick_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        assert pick_device("auto").type == "cpu"
        with pytest.raises(ValueError, match="finds no GPU"):
            pick_device("cuda")
    with pytest.raises(ValueError, match="allowed are"):
        pick_device("gpu")


def test_agent_settings_of_the_folder_are_used(folder, open_with):
    _, agent = open_with()
    assert agent == load_agent(folder) and agent.chunk_tokens == 8
