"""Evaluation: equal rows in any batch and after any interruption, failures counted, summaries against known values."""

import asyncio
import io
import json
import random
import re
import threading
import weakref
from types import SimpleNamespace

import pytest

from memrl.agents.agent_file import load_agent
from memrl.evaluation.accuracy_plot import plot_accuracy
from memrl.evaluation.evaluation_run import _print_problems
from memrl.evaluation.methods import MethodOptions, make_methods
from memrl.evaluation.runner import (
    Key,
    add_memory,
    add_turn,
    all_keys,
    depths_of,
    evaluate,
    new_row,
    read_all,
    read_to_row,
    retained_digit,
    row_key,
    share_of,
)
from memrl.evaluation.statistics import bootstrap_interval, wilson_interval
from memrl.evaluation.summary import print_table, summarize
from memrl.reading.open_model import ReaderOptions, load_settings, open_llm
from memrl.scoring.scores import SCORES
from memrl.types import Sample, Trajectory, Turn
from memrl.utils.devices import pick_device
from tests.tiny_folder import WORDS, make_folder

QUESTION = "name ?"


class WordTask:
    """Documents of random words, `length` chunks of eight; question 3 is too long for its cap, document 4 cannot be made."""

    name, length_unit, default_lengths, max_length, version, is_slow = "words", "chunks", (1, 2), None, "1", True

    def __init__(self, unmade=None):
        self.made, self.unmade, self.threads = [], unmade, set()

    def count(self, length, wanted):
        return 6 if wanted is None else wanted

    def sample(self, length, index, seed):
        self.made.append((length, index))
        self.threads.add(threading.current_thread())
        if index == self.unmade:
            raise ValueError("the pool is too small\nand more")
        rng = random.Random(f"{seed} {length} {index}")
        question = "who ? " * 9 if index == 3 else QUESTION
        words = rng.choices(WORDS, k=8 * length)
        return Sample(f"w{length}-{index}", question, " ".join(words), (words[0],), metadata={"depths": [0]})

    def num_tokens(self, length):
        return 8 * length

    def check(self, lengths, seed):
        pass


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


def plain(rows):
    """Without the columns that differ between runs."""
    measured = ("seconds", "peak_gib")
    return [{name: value for name, value in row.items() if name not in measured} for row in rows]


# --- rows ------------------------------------------------------------------------------------------------------------------


def test_rows_have_every_column_in_order_of_length_and_index(rows):
    assert [row_key(row) for row in rows] == [Key("memory", "words", n, i, 0) for n in (1, 3) for i in range(6)]
    assert set(rows[0]) == {
        *("model", "method", "task", "length", "index", "repeat", "id", "question", "answers", "match", "response"),
        *("answer", "memory", "strict", "lenient", "exact", "f1", "ruler", "chunks", "tokens", "cut_tokens", "prompt_tokens"),
        *("turns", "numbers"),
        *("response_tokens", "seconds", "peak_gib", "depths", "held", "chunk_tokens", "error"),
    }
    for row in rows:
        if row["index"] != 3:
            assert (row["chunks"], row["tokens"], row["error"]) == (row["length"], 8 * row["length"], None)
            # Q, M, S and three marks of the chat around 2, 1 to 4 and 8 tokens; at most 4 tokens of memory, 3 of answer.
            assert 8 * row["length"] < row["prompt_tokens"] <= (row["length"] + 1) * 20
            assert row["length"] + 1 <= row["response_tokens"] <= 4 * row["length"] + 3
            assert len(row["held"]) == row["chunks"] and set(row["held"]) <= {"0", "9"}
            assert row["seconds"] > 0 and row["peak_gib"] > 0
            assert (row["depths"], row["chunk_tokens"]) == ([0.0], 8)
    assert (
        len({row["response"] for row in rows}) > 4
    )  # sampled at temperature 1; with equal responses the tests below would prove little


def test_results_do_not_depend_on_the_batch(rows, open_with):
    for max_rows in (1, 3):
        llm, agent = open_with(max_rows=max_rows)
        assert plain(evaluate(llm, WordTask(), [1, 3], 6, agent, seed=7)) == plain(rows)
    llm, agent = open_with()
    assert plain(evaluate(llm, WordTask(), [3], 2, agent, seed=7)) == plain(rows[6:8])


def test_shards_are_together_all_of_it(rows, open_with):
    llm, agent = open_with()
    parts = [evaluate(llm, WordTask(), [1, 3], 6, agent, 7, shard=(rank, 3)) for rank in range(3)]
    assert sorted(plain([row for part in parts for row in part]), key=row_key) == plain(rows)


def test_ranks_get_documents_of_every_length_the_longest_first():
    task, lengths = WordTask(), {"words": [1, 3]}
    keys = all_keys([task], lengths, 5, ["memory", "one_shot"], repeats=2)
    parts = [share_of(keys, {"words": task}, rank, 2) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(keys) and len(set(keys)) == len(keys) == 40
    for part in parts:
        assert [key.length for key in part] == sorted((key.length for key in part), reverse=True)
        assert {key.length for key in part} == {1, 3}
        assert all(len({key.document for key in part[i : i + 4]}) == 1 for i in range(0, 20, 4))  # a document's four readings
    assert not {key.document for key in parts[0]} & {key.document for key in parts[1]}


def test_finished_documents_are_not_even_made(rows, open_with):
    llm, agent = open_with()
    task = WordTask()
    keys = [row_key(row) for row in rows[-2:]]
    methods = make_methods(["memory"], MethodOptions(), agent, None)
    columns = {"model": "", "chunk_tokens": 8}
    assert plain(read_all(llm, keys, {"words": task}, methods, 7, columns=columns)) == plain(rows[-2:])
    assert sorted(task.made) == [(3, 4), (3, 5)]


@pytest.mark.parametrize("is_slow", [True, False])
def test_documents_are_made_only_as_rows_have_room(open_with, is_slow):
    llm, agent = open_with(max_rows=2)
    task, finished, most_open = WordTask(), 0, 0
    task.is_slow = is_slow

    def on_result(row):
        nonlocal finished, most_open
        most_open = max(most_open, len(task.made) - finished)
        finished += 1

    evaluate(llm, task, [2], 20, agent, 0, on_result=on_result)
    assert (finished, most_open) == (20, 2)
    assert (threading.main_thread() in task.threads, len(task.threads)) == (not is_slow, 1)


@pytest.mark.parametrize("is_slow", [True, False])
def test_document_that_cannot_be_made_is_a_failure_and_the_others_go_on(rows, open_with, is_slow):
    llm, agent = open_with()
    task = WordTask(unmade=4)
    task.is_slow = is_slow
    found = evaluate(llm, task, [3], 6, agent, seed=7)
    assert plain(found[:4]) == plain(rows[6:10]) and plain(found[5:]) == plain(rows[11:])
    assert (found[4]["error"], found[4]["id"]) == ("ValueError: the pool is too small", "words-3-4")
    assert set(found[4]) == set(rows[0]) and not any(found[4][score] for score in SCORES)


def test_a_document_is_made_once_for_all_its_readings_and_then_forgotten(open_with):
    llm, agent = open_with(max_rows=3)
    methods = make_methods(["memory", "one_shot", "retrieval"], MethodOptions(), agent, 100)
    task = WordTask()
    keys = all_keys([task], {"words": [2]}, 3, list(methods), repeats=2)
    rows = read_all(llm, share_of(keys, {"words": task}), {"words": task}, methods, 0)
    assert task.made == [(2, 0), (2, 1), (2, 2)] and sorted(map(row_key, rows)) == sorted(keys)
    assert {row["method"]: (row["chunks"], len(row["held"])) for row in rows} == {
        "memory": (2, 2),
        "one_shot": (0, 0),
        "retrieval": (0, 0),
    }
    assert all(row["tokens"] == 16 and row["error"] is None for row in rows)

    documents, alive = [], []

    class Watched(WordTask):
        def sample(self, length, index, seed):
            sample = super().sample(length, index, seed)
            documents.append(weakref.ref(sample))
            return sample

    def on_result(row):
        alive.append(sum(document() is not None for document in documents))

    llm, _ = open_with(max_rows=1)
    keys = all_keys([task], {"words": [2]}, 4, ["memory"], repeats=2)
    read_all(llm, keys, {"words": Watched()}, methods, 0, on_result=on_result)
    assert len(documents) == 4 and max(alive) == 1


def test_repeats_are_other_draws_and_each_keeps_its_own(open_with):
    llm, agent = open_with()
    methods = make_methods(["memory"], MethodOptions(), agent, None)
    task = WordTask()

    def read(repeats, seed=0):
        keys = all_keys([task], {"words": [2]}, 3, list(methods), repeats)
        return {row_key(row): row["response"] for row in read_all(llm, keys, {"words": task}, methods, seed)}

    four, two = read(4), read(2)
    assert two.items() <= four.items()
    for index in range(3):
        assert len({four[Key("memory", "words", 2, index, repeat)] for repeat in range(4)}) > 1
    assert read(2, seed=1) != two


# --- the columns of a reading ----------------------------------------------------------------------------------------------


def turn(kind, text, memory=None):
    return Turn(kind, [1, 2, 3], [4, 5], [0.0, 0.0], "stop", text, memory=memory)


def test_the_retained_digit_is_the_share_of_the_answers_in_the_memory():
    answers = ["red fox", "blue hen", "owl"]
    memories = ("", "the owl", "Owl: red  fox.", "owl, red fox, blue-hen")
    assert [retained_digit(text, answers, "all") for text in memories] == list("0369")
    assert [retained_digit(text, answers, "any") for text in ("", "bowl", "the OWL", "owl, red fox")] == list("0099")


def test_answers_that_occur_in_any_text_are_not_counted_as_retained():
    for match in ("any", "all"):
        assert [retained_digit("yes and no", answers, match) for answers in (["no"], ["Yes.", "no"], [])] == [""] * 3
    assert [retained_digit(text, ["no", "owl", "hen"], "all") for text in ("no", "no owl", "hen, owl")] == list("049")
    assert [retained_digit(text, ["no", "owl"], "any") for text in ("no", "an owl")] == list("09")
    sample = Sample("s", "q", "", ("yes",))
    row = new_row(sample)
    add_memory(row, sample, turn("memory", "yes", "yes"))
    assert (row["held"], row["chunks"]) == ("", 1)


def test_a_row_counts_turns_and_drops_their_prompts():
    sample = Sample("s", "q", "", ("owl",))
    row = new_row(sample)
    turns = [turn("memory", "keep", "an owl"), turn("memory", "a hen", "a hen"), turn("answer", "owl")]
    for one in turns:
        add_turn(row, one)
        if one.memory is not None:
            add_memory(row, sample, one)
    assert (row["held"], row["chunks"], row["memory"], row["turns"]) == ("90", 2, "a hen", {"memory": 2, "answer": 1})
    assert (row["prompt_tokens"], row["response_tokens"]) == (9, 6)
    assert [one.prompt_ids for one in turns] == [[], [], [1, 2, 3]]  # a turn without a memory may begin a conversation
    assert all(one.response_logprobs == [] and one.response_ids == [4, 5] for one in turns)


def read_one(response, answers=("owl",), match="any", error=None):
    """`read_to_row` with a method that answers `response`, or raises, after one memory turn; the llm has no model."""

    class Method:
        name = "memory"

        async def run(self, session, sample):
            one = turn("memory", "an owl", "an owl")
            session.on_turn(one)
            session.on_memory(one, [4, 5])
            if error is not None:
                raise error
            return Trajectory(response=response, memory="an owl at last", scores={"cut_tokens": 0.0, "passes": 2.0})

    llm = SimpleNamespace(session=lambda *identity, **watchers: SimpleNamespace(**watchers, encode=str.split))
    kinds = []
    row = asyncio.run(read_to_row(llm, Method(), Sample("s", "q", "a b c", tuple(answers), match), (0, 1), kinds.append))
    assert kinds == ["memory"]
    return row


def test_empty_answers_are_wrong_by_every_score():
    right = read_one("\\boxed{owl}")
    assert all(right[score] == 1.0 for score in SCORES) and (right["answer"], right["tokens"]) == ("owl", 3)
    assert right["numbers"] == {"passes": 2.0} and right["turns"] == {"memory": 1}
    assert right["memory"] == "an owl at last" and right["peak_gib"] is None  # the model is not in this process
    for response in ("", "  \n", "the owl \\boxed{}", "\\boxed{ } owl", "<think>owl</think>"):
        row = read_one(response, [""])
        assert (row["answer"], row["error"], sum(row[score] for score in SCORES)) == ("", None, 0.0)


def test_all_answers_have_to_be_named_if_the_match_is_all():
    row = read_one("\\boxed{owl, hen}", ["owl", "hen", "fox", "cow"], "all")
    assert (row["match"], row["ruler"], row["lenient"], row["held"]) == ("all", 0.5, 0.0, "2")


def test_a_failed_reading_keeps_what_was_read_and_scores_nothing():
    row = read_one("", error=TimeoutError("no answer from the server\nfor long"))
    assert row["error"] == "TimeoutError: no answer from the server"
    assert (row["memory"], row["chunks"], row["held"], row["response"]) == ("an owl", 1, "9", "")
    assert not any(row[score] for score in SCORES)
    assert read_one("", error=RuntimeError())["error"] == "RuntimeError"
    for tries in ("", " (try 2 of 8)", " (try 8 of 8)"):  # one kind of failure has one text
        row = read_one("", error=ConnectionError(f"at: HTTP 503: (busy){tries}"))
        assert row["error"] == "ConnectionError: at: HTTP 503: (busy)"


def test_only_depths_that_are_shares_of_the_document_are_used():
    def depths(value):
        return depths_of(Sample("s", "q", "c", metadata={"depths": value}))

    assert depths([0, 0.5, 1]) == [0.0, 0.5, 1.0] and depths_of(Sample("s", "q", "c")) == []
    for other in ("0.5", 0.5, [2], [-0.1], ["a"], [float("nan")], [None], {}):
        assert depths(other) == []


# --- failures, intervals, tables -------------------------------------------------------------------------------------------


def test_failures_are_wrong_answers_and_never_dropped(rows):
    failed = [row for row in rows if row["error"]]
    assert [row["index"] for row in failed] == [3, 3]
    assert failed[0]["error"].startswith("ValueError: the question has 18 tokens")
    assert not any(failed[0][score] for score in SCORES)
    changed = [
        {**row, "strict": 0.0 if row["error"] else 1.0, "answer": "x" * (row["index"] > 1 and not row["error"])} for row in rows
    ]
    summary = summarize(changed)
    assert [(entry["n"], entry["failures"], entry["empty"]) for entry in summary] == [(6, 1, 2), (6, 1, 2)]
    assert summary[0]["strict"] == pytest.approx(5 / 6)
    assert summary[0]["strict_interval"] == list(wilson_interval(5, 6))


def reading(index, repeat=0, *, match="any", answers=("a",), **scores):
    row = dict.fromkeys(SCORES, 0.0) | {"task": "t", "length": 1, "method": "memory", "index": index, "repeat": repeat}
    sizes = dict.fromkeys(("chunks", "tokens", "prompt_tokens", "response_tokens"), 2)
    costs = {"seconds": 1.0 + index, "peak_gib": 0.5 + index}
    return row | sizes | costs | {"error": None, "answer": "x", "match": match, "answers": list(answers)} | scores


def test_repeats_are_averaged_within_their_sample_before_anything_else():
    # Sample 0 was read four times and always right, sample 1 once and wrong: a mean over readings would say 80%.
    rows = [reading(0, repeat, strict=1.0) for repeat in range(4)] + [reading(1, strict=0.0)]
    (entry,) = summarize(rows)
    assert (entry["n"], entry["repeats"], entry["strict"]) == (2, 4, 0.5)
    # The interval is over samples: reading the same two samples more often does not narrow it.
    more = [reading(index, repeat, strict=float(index == 0)) for index in range(2) for repeat in range(64)]
    assert entry["strict_interval"] == summarize(more)[0]["strict_interval"] == list(wilson_interval(1, 2))


def test_intervals_have_a_width_if_all_samples_score_the_same():
    rows = [reading(i, repeat, **dict.fromkeys(SCORES, 1.0), match="all", answers="ab") for i in range(4) for repeat in range(2)]
    (entry,) = summarize(rows)
    assert all(entry[f"{score}_interval"] == list(wilson_interval(4, 4)) for score in SCORES)


def test_intervals_are_wilsons_for_proportions_and_bootstrapped_for_shares():
    values = [0.25, 1.0, 0.5, 0.0, 1.0]
    (entry,) = summarize([reading(i, f1=v, ruler=v, match="all", answers="abcd") for i, v in enumerate(values)])
    assert entry["f1_interval"] == entry["ruler_interval"] == list(bootstrap_interval(values))
    assert entry["strict_interval"] == list(wilson_interval(0, 5))
    (entry,) = summarize([reading(i, ruler=1.0) for i in range(5)])
    assert entry["ruler_interval"] == list(wilson_interval(5, 5))
    (entry,) = summarize([reading(i, ruler=1.0, match="all") for i in range(5)])  # one answer: all or nothing
    assert entry["ruler_interval"] == list(wilson_interval(5, 5))


def test_the_least_length_of_cut_documents_is_named_beside_files(capsys):
    cut = {"method": "one_shot", "cut_tokens": 5}
    _print_problems([reading(0, length=length, **cut) for length in ("file", 900, 8192)])
    assert "the middle of 3 documents was cut out, from length 900 on" in capsys.readouterr().out


def test_costs_are_optional_because_they_differ_between_runs():
    rows = [reading(0), reading(1), reading(2, method="one_shot", peak_gib=None)]
    entries, costs = summarize(rows), [{"mean_seconds": 1.5, "peak_gib": 1.5}, {"mean_seconds": 3.0, "peak_gib": None}]
    assert summarize(rows, costs=True) == [entry | cost for entry, cost in zip(entries, costs, strict=True)]
    assert not {"mean_seconds", "peak_gib"} & set(entries[0])


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


def test_table_and_summary(capsys, rows):
    other = [{**row, "method": "retrieval", "task": "words[1]", "length": "file"} for row in rows]
    summary = summarize([*rows, *other], costs=True)
    print_table(summary, {"words": "chunks"})
    printed = capsys.readouterr().out
    assert "length (chunks)" in printed
    assert "retrieval" in printed and "words[1]" in printed
    assert json.loads(json.dumps(summary)) == summary
    assert {"task", "length", "method", "n", "failures", "empty", *SCORES} <= set(summary[0])


def table_of(entries, width=None, monkeypatch=None):
    """The printed table's lines; on a terminal if a width is given."""
    file = io.StringIO()
    if width is not None:
        file.isatty = lambda: True
        for name, value in {"COLUMNS": width, "LINES": 40, "TERM": "xterm"}.items():
            monkeypatch.setenv(name, str(value))
    print_table(entries, {"niah_multikey_1_and_more": "tokens", "needle": "chunks"}, file)
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in file.getvalue().splitlines()]


def test_no_name_and_no_number_of_the_table_is_cut(monkeypatch):
    sizes = {"tokens": 1_048_576, "strict": 1.0, "lenient": 1.0, "exact": 1.0, "f1": 1.0, "ruler": 1.0}
    names = ("needle", "niah_multikey_1_and_more")
    entries = summarize([reading(0, task=name, length=1_048_576, method="retrieval", **sizes) for name in names])
    entries = [{**entry, "repeats": 16, "n": 500, "mean_seconds": 1234.0} for entry in entries]
    for lines in (table_of(entries), table_of(entries, 200, monkeypatch)):
        (row,) = [line for line in lines if "niah" in line]
        assert row.split()[:5] == ["niah_multikey_1_and_more", "retrieval", "1048576", "tokens", "500"]
        assert row.split()[-5:] == ["100.0", "100.0", "100.0", "1,048,576", "1.23e+03"]
    lines = table_of(entries, 60, monkeypatch)
    first = next(number for number, line in enumerate(lines) if "niah" in line)
    assert "".join(line.split()[0] for line in lines[first : first + 2]) == names[1]  # folded, and nothing is lost
    assert lines[first].split()[-2:] == ["1,048,576", "1.23e+03"] and not any("\u2026" in line for line in lines)


def test_plot_is_written_and_needs_lengths(tmp_path):
    entry = {"strict": 0.5, "strict_interval": [0.4, 0.6], "lenient": 0.5, "lenient_interval": [0.4, 0.6]}
    series = {name: [{**entry, "length": n} for n in (1, 4, 8192)] for name in ("before RL", "after RL")}
    plot_accuracy(tmp_path / "plot.png", series, trained_to=4)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_accuracy(tmp_path / "none.png", {"a": [{**entry, "length": "file"}]})


def test_broken_results_file_ends_the_run_at_once(open_with):
    llm, agent = open_with(max_rows=1)
    calls = []

    def full_disk(row):
        calls.append(row)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        evaluate(llm, WordTask(), [1], 6, agent, 0, on_result=full_disk)
    assert len(calls) == 1


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


# --- numbers that say nothing ----------------------------------------------------------------------------------------------


def test_readings_of_a_model_whose_outputs_are_not_numbers_fail_and_say_so(open_with):
    import torch

    for temperature in (0.0, 1.0):
        llm, agent = open_with(temperature=temperature)
        with torch.no_grad():
            next(llm.sampler.model.parameters())[7:9, 0] = float("nan")
        rows = evaluate(llm, WordTask(), [1], 2, agent, seed=7)
        assert {row["error"] for row in rows} == {
            "ValueError: outputs of the model are NaN or infinite: its weights are damaged, or too large for the dtype"
        }


class Panic(BaseException):
    """As pyo3's, which no Python module exports."""


Panic.__module__ = "pyo3_runtime"


@pytest.mark.parametrize("place", ["sample", "encode"])
def test_a_document_on_which_a_library_panics_is_one_failed_reading(open_with, monkeypatch, place):
    llm, agent = open_with()
    task, encode = WordTask(), llm.encode
    sample = task.sample

    def poison(*arguments):
        raise Panic("index out of range\x1b[2J\nnote: run with RUST_BACKTRACE=1")

    if place == "sample":
        task.sample = lambda length, index, seed: poison() if index == 1 else sample(length, index, seed)
    else:
        text = sample(1, 1, 7).context
        llm.encode = lambda given: poison() if given == text else encode(given)
    rows = evaluate(llm, task, [1], 3, agent, seed=7)
    assert [row["error"] for row in rows] == [None, "Panic: index out of range\\x1b[2J", None]


@pytest.mark.parametrize("problem", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_run_is_no_failed_reading(open_with, problem):
    llm, agent = open_with()
    task = WordTask()
    task.is_slow = False

    def stop(length, index, seed):
        raise problem

    task.sample = stop
    with pytest.raises(problem):
        evaluate(llm, task, [1], 2, agent, seed=7)
