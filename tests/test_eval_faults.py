"""The results folder of an evaluation: every reading exactly once, after kills at any time and with any number of ranks."""

import contextlib
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from memrl.evaluation import eval_ranks
from memrl.evaluation.eval_ranks import Ranks
from memrl.evaluation.results import RankResults, Results
from memrl.evaluation.runner import Key, row_key
from memrl.scoring.scores import SCORES
from tests.tiny_folder import WORDS, make_folder

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {
    "format": 3,
    "weights": "abc",
    "methods": {"memory": {"chunk_tokens": 5}},
    "seed": 0,
    "model_path": "m",
    "tasks": {"words": "1"},
}


def make_row(index, length=1, error=None, **columns):
    row = {"method": "memory", "task": "words", "length": length, "index": index, "repeat": 0, "response": f"r{index}"}
    row |= {"model": "m", "id": f"w{index}", "question": "q", "answers": ["a"], "answer": "", "depths": [], "held": ""}
    row |= dict.fromkeys((*SCORES, "chunks", "tokens", "prompt_tokens", "response_tokens", "chunk_tokens"), 0)
    return row | {"error": error, "seconds": 1.0, "peak_gib": 0.5} | columns


ROWS = [make_row(index) for index in range(4)]


def rows_in(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def fill(folder: Path, rows, settings=SETTINGS) -> Path:
    with Results(folder, settings) as results:
        for row in rows:
            results.add(row)
    return folder / "samples.jsonl"


# --- one process -----------------------------------------------------------------------------------------------------------


def test_torn_last_line_is_repaired_and_the_others_are_kept(tmp_path):
    path = fill(tmp_path, ROWS[:3])
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with Results(tmp_path, SETTINGS) as results:
        assert list(results.rows.values()) == ROWS[:2]
        results.add(ROWS[2])
    assert path.read_bytes() == whole


def test_a_failure_is_not_finished_and_its_row_is_replaced(tmp_path):
    failed = make_row(0, error="RuntimeError: out of memory")
    again = failed | {"seconds": 7.0, "peak_gib": 9.0}
    with Results(tmp_path, SETTINGS) as results:
        for row in (failed, ROWS[1], again):  # the same failure again is not written again
            results.add(row)
        assert results.finished == {row_key(ROWS[1])}
    assert rows_in(tmp_path) == [failed, ROWS[1]]
    with Results(tmp_path, SETTINGS) as results:
        assert (results.finished, results.rows[row_key(failed)]) == ({row_key(ROWS[1])}, failed)
        results.add(ROWS[0])
        assert len(rows_in(tmp_path)) == 3  # until the command ends, or the next one starts
    with Results(tmp_path, SETTINGS) as results:
        assert rows_in(tmp_path) == ROWS[:2] and results.finished == {row_key(row) for row in ROWS[:2]}
        results.add(ROWS[2])
    assert rows_in(tmp_path) == ROWS[:3]


def test_other_settings_are_refused_naming_them(tmp_path):
    fill(tmp_path, ROWS[:1])
    for changed, named in (
        ({"methods": {"memory": {"chunk_tokens": 6}}}, r"methods\.memory\.chunk_tokens \(5 there, 6 now\)"),
        ({"seed": 1, "weights": "x"}, r"seed .*weights"),
        ({"tasks": {"words": "2"}}, r"tasks\.words"),
        ({"served_model": "its name"}, r"served_model \(null there"),
    ):
        with pytest.raises(ValueError, match=named):
            Results(tmp_path, SETTINGS | changed)
    with pytest.raises(ValueError, match="already holds results"):
        Results(tmp_path, SETTINGS, resume=False)
    added = {"model_path": "moved", "endpoint": "http://there", "tasks": {"other": "1"}, "methods": {"retrieval": {"tokens": 9}}}
    with Results(tmp_path, SETTINGS | added) as results:
        assert len(results.rows) == 1
    config = json.loads((tmp_path / "eval_config.json").read_text())
    assert config["tasks"] == {"words": "1", "other": "1"}
    assert config["methods"] == {"memory": {"chunk_tokens": 5}, "retrieval": {"tokens": 9}}


def test_folder_of_the_earlier_format_is_refused(tmp_path):
    row = {name: value for name, value in ROWS[0].items() if name not in ("method", "repeat")}
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + "\n")
    old = {"format": 2, "weights": "abc", "methods": {"memory": {}}, "seed": 0, "tasks": {"words": "1"}}
    (tmp_path / "eval_config.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match=r"another format \(2 there, 3 now\).*give another --out"):
        Results(tmp_path, SETTINGS)
    assert json.loads((tmp_path / "eval_config.json").read_text()) == old


def test_damaged_files_are_named(tmp_path):
    path = fill(tmp_path, ROWS[:1])
    good = path.read_bytes()
    for line in (b"{]\n", b"[1]\n", b'{"error": null}\n', b"\xff\n"):
        path.write_bytes(line + good)
        with pytest.raises(ValueError, match="line 1 is damaged"):
            Results(tmp_path, SETTINGS)
    path.write_bytes(good)
    for content in ("{", "[]", "3"):
        (tmp_path / "eval_config.json").write_text(content)
        with pytest.raises(ValueError, match=r"eval_config\.json is damaged"):
            Results(tmp_path, SETTINGS)
    (tmp_path / "eval_config.json").unlink()
    with pytest.raises(ValueError, match=r"exists without eval_config\.json"):
        Results(tmp_path, SETTINGS)


def test_two_processes_do_not_write_into_one_folder(tmp_path):
    with Results(tmp_path, SETTINGS) as results:
        results.add(ROWS[0])
        results.add(make_row(1, error="e"))
        results.add(ROWS[1])
        results.collect()  # replaces the file; the folder is still locked
        with pytest.raises(ValueError, match="another process"):
            Results(tmp_path, SETTINGS)
    Results(tmp_path, SETTINGS).close()


def test_settings_without_rows_may_be_replaced(tmp_path):
    Results(tmp_path, SETTINGS).close()
    Results(tmp_path, SETTINGS | {"weights": "repaired"}, resume=False).close()


# --- several ranks ---------------------------------------------------------------------------------------------------------


def test_rows_of_other_ranks_are_collected_once(tmp_path):
    with Results(tmp_path, SETTINGS) as results, RankResults(tmp_path, 1) as one, RankResults(tmp_path, 2) as two:
        results.add(ROWS[0])
        one.add(ROWS[1])
        two.add(ROWS[2])
        one.close(), two.close()
        results.collect()
        assert rows_in(tmp_path) == ROWS[:3] and not list(tmp_path.glob("samples.rank*"))
    with Results(tmp_path, SETTINGS) as results:
        assert list(results.rows.values()) == ROWS[:3]


def test_rows_that_a_kill_left_in_a_ranks_file_are_taken_up_by_any_number_of_ranks(tmp_path):
    fill(tmp_path, [ROWS[0], make_row(2, error="e"), ROWS[3]])
    with RankResults(tmp_path, 5) as rank:
        rank.add(ROWS[1])
        rank.add(ROWS[2])
        rank.add(make_row(3, error="it went well before"))
    path = tmp_path / "samples.rank5.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"task": "wo')  # the kill fell into a line
    Results(tmp_path, SETTINGS).close()
    assert sorted(rows_in(tmp_path), key=row_key) == ROWS and not path.exists()
    path.write_bytes(whole)  # or between the moving of the rows and the removing of the file
    Results(tmp_path, SETTINGS).close()
    assert sorted(rows_in(tmp_path), key=row_key) == ROWS and not path.exists()


def test_rows_in_a_ranks_file_alone_fix_the_settings(tmp_path):
    Results(tmp_path, SETTINGS).close()
    with RankResults(tmp_path, 1) as rank:
        rank.add(ROWS[1])
    with pytest.raises(ValueError, match="seed"):
        Results(tmp_path, SETTINGS | {"seed": 1})
    with pytest.raises(ValueError, match="already holds results"):
        Results(tmp_path, SETTINGS, resume=False)


def test_a_rank_that_still_runs_after_its_command_keeps_the_folder_locked(tmp_path):
    Results(tmp_path, SETTINGS).close()
    with RankResults(tmp_path, 1) as rank:
        rank.add(ROWS[1])
        with pytest.raises(ValueError, match="another process"):
            Results(tmp_path, SETTINGS)
    assert len(Results(tmp_path, SETTINGS).rows) == 1


def test_a_rank_without_rank_0s_folder_names_the_missing_folder(tmp_path):
    with pytest.raises(ValueError, match=r"rank 3 finds no folder .*elsewhere; give an --out on a disk that all machines share"):
        RankResults(tmp_path / "elsewhere", 3)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_ranks(code: str) -> list[tuple[int, str]]:
    """Exit code and output of two processes, each with its own `ranks`."""
    head = "from datetime import timedelta; from memrl.evaluation import eval_ranks as module\n"
    head += "ranks = module.Ranks.of_environment()\n"
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", head + code],
            cwd=ROOT,
            env=os.environ | address | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def test_rank_0_does_nothing_before_the_ranks_have_found_each_other(monkeypatch):
    monkeypatch.setattr(eval_ranks, "TIMEOUT", timedelta(seconds=0.5))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    made = []
    with pytest.raises(ConnectionError, match="the ranks of torchrun do not find each other"):
        Ranks.of_environment().from_rank_0(lambda: made.append("rows"))
    assert not made


@pytest.mark.slow
def test_ranks_wait_longer_for_each_other_than_they_take_to_connect():
    code = """import time
module.TIMEOUT = timedelta(seconds=8)
def make():
    time.sleep(9)
    return "rows"
print(ranks.from_rank_0(make))
ranks.close()
"""
    assert [(code, printed.splitlines()[-1]) for code, printed in run_ranks(code)] == [(0, "rows")] * 2


def test_a_rank_that_ends_early_ends_the_waiting_of_the_others():
    code = """ranks.from_rank_0(lambda: None)
if ranks.rank:
    module.os._exit(1)
try:
    ranks.wait()
except ConnectionError as error:
    print("error:", error)
"""
    (code, printed), _ = run_ranks(code)
    assert code == 0 and "error: another rank of torchrun has ended" in printed


def test_each_rank_of_a_machine_has_a_device_of_its_own(monkeypatch):
    import torch

    one, second = Ranks(), Ranks(rank=5, world=8, local_rank=1, local_world=4)
    assert one.device("cuda:3") == "cuda:3" and one.device("map") == "map" and second.device("cpu") == "cpu"
    for name in ("map", "cuda:0"):
        with pytest.raises(ValueError, match="4 ranks of torchrun cannot share"):
            second.device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert second.device("auto") == second.device("cuda") == "cuda:1"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="--nproc_per_node 2"):
        second.device("auto")


# --- killed for real -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("faults") / "model")


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """60 documents of up to 40 chunks; number 5 cannot be read."""
    path = tmp_path_factory.mktemp("questions") / "qa.jsonl"
    rng = random.Random(0)
    lines = []
    for index in range(60):
        question = "who ? " * 9 if index == 5 else "name ?"
        context = " ".join(rng.choices(WORDS, k=rng.randint(1, 320)))
        lines.append({"id": f"q{index}", "question": question, "context": context, "answers": [rng.choice(WORDS)]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(model, questions, out, ranks=1) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    options = ["--model", model, "--task", questions, "--out", out, "--methods", "memory,retrieval"]
    options += ["--temperature", 1, "--max_rows", 2, "--device", "cpu", "--threads", 1]
    return [sys.executable, *map(str, (*launcher, ROOT / "eval.py", *options))]


def start(arguments, log: Path) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        return subprocess.Popen(arguments, stdout=file, stderr=file, env=environment)


def kill_all(process: subprocess.Popen) -> None:
    """SIGKILL to the process and its descendants at once: torchrun's workers are in sessions of their own."""
    family = [process.pid]
    for pid in family:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            family += map(int, task.read_text().split())
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    for pid in family[1:]:  # until the system has released their locks
        while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)


def count_lines(out: Path) -> int:
    count = 0
    for path in out.glob("samples*.jsonl"):
        with contextlib.suppress(FileNotFoundError):  # rank 0 removes the other ranks' files
            count += path.read_bytes().count(b"\n")
    return count


def without_clock(rows):
    return sorted(({n: v for n, v in row.items() if n not in ("seconds", "peak_gib")} for row in rows), key=row_key)


@pytest.fixture(scope="module")
def whole(model, questions, tmp_path_factory):
    """The results of a command without interruption."""
    out = tmp_path_factory.mktemp("whole") / "out"
    arguments = command(model, questions, out)
    assert importlib.import_module("memrl.commands.eval").main(arguments[arguments.index("--model") :]) == 0
    return out


def run_killed(model, questions, folder: Path, worlds: list[int], seed: int) -> int:
    """Kill a command once per number of ranks but the last, after a random number of rows; returns the kills while it ran."""
    rng, out, kills = random.Random(seed), folder / "out", 0
    for turn, ranks in enumerate(worlds):
        process = start(command(model, questions, out, ranks), folder / "log")
        if turn < len(worlds) - 1:
            goal = count_lines(out) + rng.randint(1, 30)
            while process.poll() is None and count_lines(out) < goal:
                time.sleep(0.002)
            time.sleep(rng.random() * 0.02)
            kills += process.poll() is None
            kill_all(process) if process.poll() is None else None
        else:
            assert process.wait(300) == 0, (folder / "log").read_text()[-3000:]
    return kills


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the processes to kill in /proc")
@pytest.mark.parametrize(
    "worlds",
    [
        pytest.param([1, 1, 1], id="one process", marks=pytest.mark.slow),
        pytest.param([2, 2, 1], id="two ranks, then one", marks=pytest.mark.slow),
        pytest.param([1, 2], id="one process, then two ranks", marks=pytest.mark.slow),
    ],
)
def test_every_reading_is_there_exactly_once_after_kills(model, questions, whole, tmp_path, worlds):
    kills = run_killed(model, questions, tmp_path, worlds, seed=sum(worlds))
    assert kills == len(worlds) - 1
    rows = rows_in(tmp_path / "out")
    assert [row_key(row) for row in without_clock(rows)] == sorted(
        Key(method, "qa", "file", index) for index in range(60) for method in ("memory", "retrieval")
    )
    assert without_clock(rows) == without_clock(rows_in(whole))
    assert [row["id"] for row in rows if row["error"]] == ["q5", "q5"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        ".lock",
        "eval_config.json",
        "samples.jsonl",
        "summary.json",
    ]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "out", whole)]
    for entry in (entry for summary in summaries for entry in summary):
        del entry["mean_seconds"], entry["peak_gib"]
    assert summaries[0] == summaries[1]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the process to kill in /proc")
def test_a_rank_that_dies_fails_the_command_and_what_is_done_is_kept(model, questions, whole, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    process = start(command(model, questions, out, ranks=2), log)
    own = out / "samples.rank1.jsonl"
    while process.poll() is None and not (own.exists() and own.read_bytes().count(b"\n") >= 3):
        time.sleep(0.002)
    children = [int(p) for task in Path(f"/proc/{process.pid}/task").glob("*/children") for p in task.read_text().split()]
    workers = [pid for pid in children if b"eval.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    of_rank_1 = [pid for pid in workers if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(of_rank_1[0], signal.SIGKILL)
    assert process.wait(120) != 0
    before = count_lines(out)
    assert before >= 3
    process = start(command(model, questions, out), log)
    assert process.wait(300) == 0, log.read_text()[-3000:]
    assert without_clock(rows_in(out)) == without_clock(rows_in(whole))
