"""eval.py as people use it: continue after a kill, add lengths, and mistakes told in one line."""

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

from memrl.evaluation.runner import row_key
from tests.tiny_folder import WORDS, make_folder

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "name ?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("evaluation") / "model")


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


def test_command_adds_lengths_and_writes_every_file(folder, tmp_path, capsys):
    options = ["--model", folder, "--samples", 3, "--out", tmp_path / "out"]
    options += ["--device", "cpu", "--agent.chunk_tokens", 10]
    assert run_main(capsys, *options, "--lengths", "2,1")[0] == 0
    first = rows_in(tmp_path / "out")
    code, printed, _ = run_main(capsys, *options, "--lengths", "1,2,4")
    assert code == 0 and printed.startswith("3 documents, 12 chunks in ")
    assert len(first) == 6 and rows_in(tmp_path / "out")[:6] == first
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [(e["task"], e["length"], e["method"], e["n"]) for e in summary] == [("needle", n, "memory", 3) for n in (1, 2, 4)]
    assert (tmp_path / "out" / "accuracy.png").stat().st_size > 5000


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
    code, printed, _ = run_main(capsys, *options, "--out", out)
    assert code == 0 and printed.startswith("1 documents, ")  # the one that failed, and it fails again
    assert samples.read_bytes() == content
    code, printed, errors = run_main(capsys, *options, "--out", out, "--samples", 5)
    assert code == 0 and "results:" in printed and "documents" not in printed and errors == []
    assert samples.read_bytes() == content
    code, _, errors = run_main(capsys, *options, "--out", out, "--agent.chunk_tokens", 9)
    assert code == 2 and len(errors) == 1 and "agent.chunk_tokens (8 there, 9 now)" in errors[0]


def test_failures_are_run_again_and_replaced(folder, tmp_path, capsys):
    path, out = tmp_path / "qa.jsonl", tmp_path / "out"
    lines = [{"question": QUESTION, "context": "red " * size, "answers": ["red"]} for size in (2, 200, 3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--model", folder, "--task", path, "--out", out, "--device", "cpu", "--agent.chunk_tokens", 100]
    # 64 tokens of cache: enough for the short documents, and nobody knows yet that one is longer.
    code, printed, _ = run_main(capsys, *options, "--cache_gib", 64 * 256 / 2**30)
    assert code == 0 and "failed: qa" in printed and "cache_gib allows 64" in printed and "runs them again" in printed
    before = rows_in(out)
    assert sorted(row["index"] for row in before if row["error"]) == [1]
    assert [entry["n"] for entry in json.loads((out / "summary.json").read_text())] == [3]

    code, printed, _ = run_main(capsys, *options)
    assert code == 0 and printed.startswith("1 documents, 2 chunks") and "failed:" not in printed
    after = rows_in(out)
    assert after[:3] == before and [(row["index"], row["error"]) for row in after[3:]] == [(1, None)]
    (entry,) = json.loads((out / "summary.json").read_text())
    assert (entry["n"], entry["failures"]) == (3, 0)
    # The later line is still the one that counts, and nothing is left to do.
    code, printed, _ = run_main(capsys, *options)
    assert code == 0 and "documents" not in printed and rows_in(out) == after
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
        ([*good, "--cache_gib", "inf"], "cache_gib"),
        ([*good, "--cache_gib", "0.00000001"], "--cache_gib"),
        (["--model", folder, "--out", tmp_path / "out", "--cache_gib", "0.000005"], "--cache_gib"),
    ):
        code, printed, errors = run_main(capsys, *arguments)
        assert (code, len(errors), printed) == (2, 1, ""), (arguments, errors)
        assert named in errors[0], (arguments, errors)


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
