"""eval.py as people use it: continue after a kill, add lengths, and mistakes in one line."""

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from memrl.evaluation.runner import row_key
from tests.fake_endpoint import FakeEndpoint, Reply
from tests.tiny_folder import WORDS, make_folder

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "name ?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("evaluation") / "model")


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """A JSON lines file of 24 documents of up to 12 chunks, one of which cannot be read."""
    path = tmp_path_factory.mktemp("questions") / "qa.jsonl"
    rng = random.Random(0)
    with path.open("w") as file:
        for index in range(24):
            context = " ".join(rng.choices(WORDS, k=rng.randint(1, 96)))
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
        code = importlib.import_module("memrl.commands.eval").main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


def without_clock(row: dict) -> dict:
    return {name: value for name, value in row.items() if name not in ("seconds", "peak_gib")}


def rows_in(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def test_command_adds_lengths_and_writes_every_file(folder, tmp_path, capsys):
    options = ["--model", folder, "--samples", 3, "--out", tmp_path / "out"]
    options += ["--device", "cpu", "--agent.chunk_tokens", 10]
    assert run_main(capsys, *options, "--lengths", "2,1")[0] == 0
    first = rows_in(tmp_path / "out")
    code, printed, _ = run_main(capsys, *options, "--lengths", "1,2,4")
    assert code == 0 and printed.startswith("3 readings, 12 chunks in ")
    assert len(first) == 6 and rows_in(tmp_path / "out")[:6] == first
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [(e["task"], e["length"], e["method"], e["n"]) for e in summary] == [("needle", n, "memory", 3) for n in (1, 2, 4)]
    assert (tmp_path / "out" / "accuracy.png").stat().st_size > 5000


def test_every_file_tells_of_all_of_the_folder(folder, questions, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--model", folder, "--samples", 2, "--out", out, "--device", "cpu"]
    picture = out / "accuracy.png"

    def printed_cells():
        return [(e["task"], e["length"], e["method"]) for e in json.loads((out / "summary.json").read_text())]

    assert run_main(capsys, *options, "--lengths", "1")[0] == 0
    code, printed, _ = run_main(capsys, *options, "--lengths", "2", "--methods", "retrieval")
    cells = [("needle", 1, "memory"), ("needle", 2, "retrieval")]
    assert code == 0 and printed_cells() == cells and "length (chunks)" in printed and picture.exists()
    code, printed, _ = run_main(capsys, *options, "--task", questions)
    assert (
        code == 0 and printed_cells() == [*cells, ("qa", "file", "memory")] and "length (chunks)" in printed and picture.exists()
    )
    # Units of earlier commands' tasks are known, and a picture that cannot show all of them does not stay.
    more = ["--task", "niah_single_1", "--lengths", "400", "--agent.chunk_tokens", 100, "--agent.question_tokens", 100]
    other = [*options[:4], "--out", out, "--methods", "one_shot", "--window", 400, "--device", "cpu"]
    code, printed, errors = run_main(capsys, *other, *more)
    assert code == 0, errors
    assert printed_cells()[2:] == [("niah_single_1", 400, "one_shot"), ("qa", "file", "memory")]
    assert "1 chunks" in printed and "400 tokens" in printed and not picture.exists()
    assert f"no accuracy.png for lengths in chunks and tokens; draw them with memrl report {out} --out DIR" in printed


def test_who_interrupts_is_told_what_is_finished(folder, questions, tmp_path, capsys, monkeypatch):
    from memrl.evaluation import results

    out, add = tmp_path / "out", results.Results.add

    def interrupted(self, row):
        if len(self.rows) == 3:
            raise KeyboardInterrupt
        add(self, row)

    monkeypatch.setattr(results.Results, "add", interrupted)
    options = ["--model", folder, "--task", questions, "--out", out, "--device", "cpu", "--max_rows", 1, "--samples", 5]
    code, _, errors = run_main(capsys, *options)
    assert code == 130 and errors[-1].startswith("interrupted; 3 of 5 readings are finished; the same command continues")
    assert "a smaller one loses less" in errors[-1] and len(rows_in(out)) == 3


def test_what_goes_wrong_after_the_reading_is_one_line_too(folder, questions, tmp_path, capsys):
    from memrl.evaluation import evaluation_run as command

    out = tmp_path / "out"
    options = ["--model", folder, "--task", questions, "--out", out, "--device", "cpu", "--samples", 1]
    run = command.Evaluation.run

    def damage_and_run(evaluation):
        (out / "samples.rank1.jsonl").write_text("{]\n")
        run(evaluation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command.Evaluation, "run", damage_and_run)
        code, printed, errors = run_main(capsys, *options)
    assert (code, printed) == (2, "") and "samples.rank1.jsonl: line 1 is damaged" in errors[-1]
    assert not any("Traceback" in line for line in errors) and len(rows_in(out)) == 1


def test_stopped_command_continues_with_the_same_rows(folder, questions, tmp_path, capsys):
    options = ["--model", folder, "--task", questions, "--temperature", 1, "--max_rows", 2, "--device", "cpu"]
    code, printed, _ = run_main(capsys, *options, "--out", tmp_path / "whole")
    assert code == 0 and "failed: qa, length file, memory, sample q5: ValueError" in printed
    assert "1 failed: they count as wrong" in printed

    out = tmp_path / "out"
    assert run_main(capsys, *options, "--out", out, "--samples", 10)[0] == 0
    before = rows_in(out)
    code, printed, errors = run_main(capsys, *options, "--out", out)
    assert code == 0 and printed.startswith("15 readings, ")  # 14, and the one that failed
    assert any("9 of 24 readings are finished already" in line for line in errors)
    assert len(before) == 10 and [without_clock(row) for row in rows_in(out)[:10]] == [without_clock(row) for row in before]
    assert sorted(map(without_clock, rows_in(out)), key=row_key) == sorted(
        map(without_clock, rows_in(tmp_path / "whole")), key=row_key
    )

    content = (out / "samples.jsonl").read_bytes()
    code, printed, _ = run_main(capsys, *options, "--out", out)
    assert code == 0 and printed.startswith("1 readings, ")  # the one that failed, and it fails again
    assert (out / "samples.jsonl").read_bytes() == content
    code, printed, errors = run_main(capsys, *options, "--out", out, "--samples", 5)
    assert code == 0 and "results:" in printed and "readings" not in printed and errors == []
    assert (out / "samples.jsonl").read_bytes() == content
    code, _, errors = run_main(capsys, *options, "--out", out, "--agent.chunk_tokens", 9)
    assert code == 2 and len(errors) == 1 and "agent.chunk_tokens" not in errors[0]
    assert "methods.memory.chunk_tokens (8 there, 9 now)" in errors[0]


def test_methods_and_repeats_are_added_to_a_folder(folder, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--model", folder, "--samples", 3, "--lengths", "2", "--out", out, "--device", "cpu", "--temperature", 1]
    assert run_main(capsys, *options)[0] == 0
    first = rows_in(out)
    every = [*options, "--methods", "memory,one_shot,retrieval", "--repeats", 2]
    code, printed, _ = run_main(capsys, *every)
    assert code == 0 and printed.startswith("15 readings, ") and "3 x 2" in printed
    rows = rows_in(out)
    assert rows[:3] == first and len({row_key(row) for row in rows}) == len(rows) == 18
    assert {row["model"] for row in rows} == {f"{folder.parent.name}/model"}
    summary = json.loads((out / "summary.json").read_text())
    assert [(e["method"], e["n"], e["repeats"]) for e in summary] == [(m, 3, 2) for m in ("memory", "one_shot", "retrieval")]
    for other in (["--retrieval_tokens", 500], ["--temperature", 2], ["--label", "mine"], ["--seed", 1]):
        code, _, errors = run_main(capsys, *every, *other)
        assert code == 2 and len(errors) == 1 and "made with other settings" in errors[0]
    # What the methods that were left out were run with does not matter to the others.
    assert run_main(capsys, *options, "--retrieval_tokens", 500)[0] == 0


def test_it_is_said_when_an_agent_reads_with_prompts_that_are_not_the_models(folder, tmp_path, capsys):
    options = ["--model", folder, "--samples", 1, "--lengths", "1", "--device", "cpu", "--agent.memory_tokens", 9]
    _, _, errors = run_main(capsys, *options, "--methods", "memory,gated", "--out", tmp_path / "out")
    said = [line for line in errors if "memrl/prompts/" in line]
    assert said == ["gated: with prompts of memrl/prompts/gated.yaml, as the model's have no texts for it"]


def test_ruler_by_every_method(folder, tmp_path, capsys):
    options = ["--model", folder, "--task", "niah_single_1,vt", "--lengths", "400", "--samples", 2, "--device", "cpu"]
    options += ["--methods", "memory,one_shot,retrieval", "--agent.question_tokens", 100, "--window", 400]
    options += ["--agent.chunk_tokens", 100, "--passage_tokens", 50, "--retrieval_tokens", 100, "--out", tmp_path / "out"]
    code, printed, _ = run_main(capsys, *options)
    assert code == 0 and printed.startswith("12 readings, ")
    rows = rows_in(tmp_path / "out")
    assert {row["error"] for row in rows} == {None} and len(rows) == 12
    for row in rows:
        assert 100 <= row["tokens"] <= 400 and row["depths"] and all(0 <= depth <= 1 for depth in row["depths"])
        assert (row["chunks"] > 1, len(row["held"])) == (row["method"] == "memory", row["chunks"])
    code, printed, errors = run_main(capsys, *options[:4], "--lengths", 20, "--out", tmp_path / "short")
    assert (code, printed, len(errors)) == (2, "", 1) and "too short" in errors[0]


def test_endpoint_is_measured_by_every_method_and_what_failed_there_is_run_again(folder, tmp_path, capsys):
    out, is_broken = tmp_path / "out", True

    def answer(body):
        return Reply(status=400, message="too long") if is_broken and "river" in str(body["messages"]) else Reply("red river")

    path = tmp_path / "qa.jsonl"
    lines = [{"question": QUESTION, "context": f"{word} " * 20, "answers": ["red river"]} for word in ("blue", "river", "grey")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with FakeEndpoint(answer, models=("served/name",)) as server:
        options = ["--model", "served/name", "--endpoint", server.url, "--tokenizer", folder, "--task", path, "--out", out]
        options[4:4] = ["--retrieval_tokens", 500]
        options += ["--methods", "memory,one_shot,retrieval", "--window", 1000]
        code, printed, _ = run_main(capsys, *options)
        assert code == 0 and "too long" in printed and printed.startswith("9 readings, ")
        failed = {(row["method"], row["index"]) for row in rows_in(out) if row["error"]}
        # The answer of the first chunk has the word in it too, which the memory turns after it show.
        assert {("one_shot", 1), ("retrieval", 1)} <= failed and len(rows_in(out)) == 9
        is_broken = False
    with FakeEndpoint(answer, models=("served/name",)) as server:  # started again, on another port
        options[3] = server.url
        code, printed, _ = run_main(capsys, *options)
        assert code == 0 and printed.startswith(f"{len(failed)} readings, ")
        sent = len(server.bodies)
        assert run_main(capsys, *options)[0] == 0 and len(server.bodies) == sent
        code, _, errors = run_main(capsys, "--model", "another", *options[2:-6], *options[-4:], "--out", tmp_path / "another")
        assert (code, len(errors)) == (2, 1) and "another" in errors[0]
    rows = rows_in(out)
    assert len(rows) == 9 and {(row["lenient"], row["model"], row["peak_gib"]) for row in rows} == {(1.0, "served/name", None)}
    assert {row["held"] for row in rows if row["method"] == "memory"} == {"999"}


def test_an_evaluation_without_an_answer_ends_with_code_1(folder, tmp_path, capsys):
    path = tmp_path / "qa.jsonl"
    lines = [{"id": f"\x1b]0;{number}", "question": "who ? " * 9, "context": "red", "answers": ["red"]} for number in range(2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--model", folder, "--task", path, "--out", tmp_path / "out", "--device", "cpu"]
    for again in (False, True):
        code, printed, errors = run_main(capsys, *options)
        assert code == 1 and "2 failed: they count as wrong" in printed and printed.endswith(f"results: {tmp_path / 'out'}\n")
        assert errors[-1].startswith("error: all 2 readings failed, so the scores say nothing about the model; ")
        assert any("0 of 2 readings are finished already; 2 that failed run again" in line for line in errors) is again
        assert "sample \\x1b]0;0: ValueError" in printed and "\x1b" not in printed
    assert len(rows_in(tmp_path / "out")) == 2


def test_failures_are_run_again_and_replaced(folder, tmp_path, capsys):
    path, out = tmp_path / "qa.jsonl", tmp_path / "out"
    lines = [{"question": QUESTION, "context": "red " * size, "answers": ["red"]} for size in (2, 200, 3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--model", folder, "--task", path, "--out", out, "--device", "cpu", "--agent.chunk_tokens", 100]
    # 64 tokens of cache: enough for the short documents, and that one is longer is not known yet.
    code, printed, _ = run_main(capsys, *options, "--cache_gib", 64 * 256 / 2**30)
    assert code == 0 and "failed: qa" in printed and "cache_gib allows 64" in printed and "runs them again" in printed
    before = rows_in(out)
    assert sorted(row["index"] for row in before if row["error"]) == [1]
    assert [entry["n"] for entry in json.loads((out / "summary.json").read_text())] == [3]

    code, printed, _ = run_main(capsys, *options)
    assert code == 0 and printed.startswith("1 readings, 2 chunks") and "failed:" not in printed
    after = rows_in(out)
    assert len(after) == 3 and all(row in after for row in before if row["error"] is None)  # every document once
    assert sorted((row["index"], row["error"]) for row in after) == [(0, None), (1, None), (2, None)]
    (entry,) = json.loads((out / "summary.json").read_text())
    assert (entry["n"], entry["failures"]) == (3, 0)
    code, printed, _ = run_main(capsys, *options)
    assert code == 0 and "readings" not in printed and rows_in(out) == after
    assert json.loads((out / "summary.json").read_text()) == [entry]


def test_cache_that_holds_no_turn_leaves_no_rows(folder, tmp_path, capsys):
    options = ["--model", folder, "--samples", 2, "--lengths", "1", "--out", tmp_path / "out", "--device", "cpu"]
    # Q, M, S and three marks of the chat, 6 + 4 + 8 in the slots, 4 generated: 28 tokens fit a page of 64.
    code, _, _ = run_main(capsys, *options, "--cache_gib", 64 * 256 / 2**30)
    assert code == 0 and len(rows_in(tmp_path / "out")) == 2
    options[-3] = tmp_path / "other"
    code, printed, errors = run_main(capsys, *options, "--cache_gib", 63 * 256 / 2**30)
    assert (code, printed, len(errors)) == (2, "", 1)
    assert "a cache of 64 tokens" in errors[0] and "allows 0" in errors[0] and "--cache_gib" in errors[0]
    assert rows_in(tmp_path / "other") == []


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
        (["--model", folder, "--lengths", "1,999999999999"], "999999999999"),
        ([*good, "--seed", "-1"], "seed"),
        ([*good, "--seed", 2**63], "seed"),
        ([*good, "--repeats", "0"], "repeats"),
        ([*good, "--repeats", "2"], "--temperature 1"),
        ([*good, "--methods", "memori"], "memori"),
        ([*good, "--methods", "memory,memory"], "twice"),
        ([*good, "--methods", ""], "method"),
        ([*good, "--methods", "one_shot", "--window", "10000000"], "window"),
        ([*good, "--tokenizer", folder], "--tokenizer"),
        ([*good, "--endpoint", "http://localhost:1/v1"], "--tokenizer"),
        ([*good, "--endpoint", "http://localhost:1/v1", "--tokenizer", tmp_path / "no"], "no such folder"),
        ([*good, "--endpoint", "http://localhost:1/v1", "--tokenizer", folder, "--yarn", "4"], "yarn"),
        (["--model", folder, "--task", "needle,vt", "--lengths", "8k"], "chunks of needle, tokens of vt"),
        (["--model", folder, "--task", "niah_single_2"], "--essays"),
        ([*good, "--cache_gib", "inf"], "cache_gib"),
        ([*good, "--cache_gib", "0.00000001"], "--cache_gib"),
        (["--model", folder, "--out", tmp_path / "out", "--cache_gib", "0.000005"], "--cache_gib"),
    ):
        code, printed, errors = run_main(capsys, *arguments)
        assert (code, len(errors), printed) == (2, 1, ""), (arguments, errors)
        assert named in errors[0], (arguments, errors)


def test_help_needs_neither_torch_nor_transformers():
    code = """import importlib, sys
for name in ("eval", "infer"):
    try:
        importlib.import_module(f"memrl.commands.{name}").main(["--help"])
    except SystemExit:
        print("torch" in sys.modules, "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert [line for line in done.stdout.splitlines() if line[:5] in ("True ", "False")] == ["False False"] * 2
    assert "--lengths" in done.stdout and "--trace" in done.stdout
