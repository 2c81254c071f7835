"""Reward functions that do harm without meaning to: each costs one reward, with one reason, and the next score is right."""

import json
import os
import resource
import time

import pytest

from memrl.scoring.reward_pool import OUTPUT_LIMIT, RewardPool
from memrl.scoring.reward_worker import judge
from memrl.utils.plain_text import one_line
from tests.test_reward_pool import pids, scored

LIMIT_S = 1.0

ATTACKS = r"""
import asyncio, gc, os, signal, sys, threading, time

class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")

class Liar(BaseException):
    @property
    def __traceback__(self):
        raise RuntimeError
    def __str__(self):
        return "x" * 10**7 + "\x1b[2J"

class Repr:
    def __repr__(self):
        raise RuntimeError

def raising(error):
    def run(metadata):
        raise error
    return run

def write_for_ever(metadata):
    while True:
        os.write(metadata["descriptor"], b"x" * 65536)

def close_and_open(metadata):
    os.closerange(0, 1000)
    for _ in range(50):
        os.open(metadata["file"], os.O_RDWR | os.O_CREAT)
    return 1.0

def write_everywhere(metadata):
    for descriptor in range(3, 1000):
        try:
            os.write(descriptor, b"xxxxxxxxxxxxxxxx")
        except OSError:
            pass
    return 1.0

def fork(metadata):
    os.fork()
    return 1.0

def fork_and_exit(metadata):
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)

def change_folder(metadata):
    os.chdir("/")
    return 1.0

def where(metadata):
    return {"reward": 1.0, os.getcwd(): 1.0}

def replace_streams(metadata):
    sys.stdout = sys.stderr = None
    return 1.0

def block_signals(metadata):
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    time.sleep(600)

def late_alarm(metadata):
    signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.01)
    return 1.0

def stop_itself(metadata):
    os.kill(os.getpid(), signal.SIGSTOP)

def stop_later(metadata):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    return 1.0

async def coroutine():
    return 1.0

ATTACKS = {
    "close all": lambda m: os.closerange(0, 1000),
    "close and open": close_and_open,
    "write": write_for_ever,
    "write everywhere": write_everywhere,
    "unprintable": raising(Unprintable()),
    "liar": raising(Liar()),
    "escape": raising(ValueError("\x1b[2Jred \ud800")),
    "interrupt": raising(KeyboardInterrupt()),
    "exit": raising(SystemExit("a" * 1000)),
    "generator exit": raising(GeneratorExit()),
    "exit at once": lambda m: os._exit(0),
    "list": lambda m: [0] * 10**7,
    "text": lambda m: "x" * 10**8,
    "names": lambda m: {"reward": 1.0} | {f"n{i}": 1.0 for i in range(10**5)},
    "long name": lambda m: {"reward": 1.0, "n" * 10**7: 1.0},
    "repr": lambda m: Repr(),
    "generator": lambda m: (i for i in range(3)),
    "coroutine": lambda m: coroutine(),
    "memory": lambda m: bytearray(3 * 2**30),
    "fork": fork,
    "fork and exit": fork_and_exit,
    "folder": change_folder,
    "where": where,
    "streams": replace_streams,
    "block": block_signals,
    "late alarm": late_alarm,
    "stop": stop_itself,
    "stop later": stop_later,
    "good": lambda m: 0.5,
}

def attack(response, answers, metadata):
    return ATTACKS[metadata["do"]](metadata)
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    path = tmp_path_factory.mktemp("attacks") / "attacks.py"
    path.write_text(ATTACKS)
    with RewardPool(f"{path}:attack", 1, LIMIT_S, memory_gib=2) as pool:
        yield pool


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ("close all", "ChildProcessError: scoring ended the worker: the function closed a file descriptor that it did not open"),
        ("write everywhere", "ChildProcessError: scoring wrote into the worker's own connection"),
        ("unprintable", "Unprintable, whose message cannot be printed (attacks.py:"),
        ("liar", "Liar: xxx"),
        ("escape", "ValueError: \N{REPLACEMENT CHARACTER}[2Jred \N{REPLACEMENT CHARACTER} (attacks.py:"),
        ("interrupt", "KeyboardInterrupt (attacks.py:"),
        ("exit", "SystemExit: aaa"),
        ("generator exit", "GeneratorExit (attacks.py:"),
        ("exit at once", "ChildProcessError: scoring ended the worker: exit status 0"),
        ("list", "TypeError: reward is [0, 0, 0, 0, 0, 0, ...], not a number"),
        ("text", "TypeError: reward is 'xxxxxxxxxxxx...xxxxxxxxxxxxx', not a number"),
        ("names", "ValueError: the returned dict has 100001 numbers"),
        ("long name", "ValueError: a score cannot be named 'nnnn"),
        ("repr", "TypeError: reward is of type Repr, not a number"),
        ("generator", "TypeError: reward is of type generator, not a number"),
        ("coroutine", "TypeError: reward is of type coroutine, not a number"),
        ("memory", "MemoryError"),
        ("block", f"TimeoutError: scoring took longer than {LIMIT_S:g} s"),
        ("stop", f"TimeoutError: scoring took longer than {LIMIT_S:g} s"),
    ],
)
def test_a_harmful_function_costs_one_reward_and_little_time(pool, do, reason):
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trajectory = scored(pool, do)
    assert trajectory.error.startswith(reason) and trajectory.error.isprintable() and len(trajectory.error) < 400
    assert trajectory.left_out and set(trajectory.scores) == {"strict", "lenient"}
    assert scored(pool, "good").reward == 0.5
    assert time.monotonic() - began < LIMIT_S + 5  # a new worker takes a second to start on a busy machine
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


@pytest.mark.parametrize("descriptor", [1, 2])
def test_output_without_end_is_cut_and_blocks_nothing(pool, capfd, descriptor):
    assert scored(pool, "write", descriptor=descriptor).error.startswith("TimeoutError")
    assert scored(pool, "good").reward == 0.5
    shown = capfd.readouterr().err
    assert shown.count("x") < OUTPUT_LIMIT + 200 and "prints more, which is not shown" in shown


def test_a_reply_never_goes_into_a_file_that_took_the_sockets_number(pool, tmp_path):
    assert "closed a file descriptor" in scored(pool, "close and open", file=str(tmp_path / "file")).error
    assert (tmp_path / "file").read_bytes() == b""


def test_a_child_that_returns_too_does_not_answer_the_next_request(pool):
    for _ in range(3):
        assert (scored(pool, "fork").reward, scored(pool, "good").reward) == (1.0, 0.5)


def test_a_child_that_outlives_its_worker_is_killed_with_it(pool):
    began = time.monotonic()
    assert scored(pool, "fork and exit").error.startswith("TimeoutError")
    assert scored(pool, "good").reward == 0.5 and time.monotonic() - began < LIMIT_S + 5


def test_a_changed_folder_or_stream_does_not_reach_the_next_call(pool):
    for do in ("folder", "streams"):
        assert scored(pool, do).reward == 1.0
        assert os.getcwd() in scored(pool, "where").scores


def test_an_alarm_that_rings_after_the_call_costs_no_reward(pool):
    assert scored(pool, "late alarm").reward == 1.0
    time.sleep(0.1)
    assert scored(pool, "good").reward == 0.5


def test_a_worker_that_stops_reading_does_not_hold_up_a_long_request(pool):
    """A request larger than the socket's buffer to a stopped process would wait for ever."""
    assert scored(pool, "stop later").reward == 1.0
    time.sleep(0.4)
    began = time.monotonic()
    assert scored(pool, "good", long="x" * 3_000_000).error.startswith("TimeoutError: the worker took no request for")
    assert time.monotonic() - began < LIMIT_S + 2
    assert scored(pool, "good").reward == 0.5


def test_memory_is_unlimited_unless_a_limit_is_set(tmp_path):
    path = tmp_path / "limits.py"
    path.write_text("import resource\ndef f(r, a, m): return {'reward': 0, 'limit': resource.getrlimit(resource.RLIMIT_AS)[0]}\n")
    for gib, limit in ((0.0, resource.getrlimit(resource.RLIMIT_AS)[0]), (1.5, 1.5 * 2**30)):
        with RewardPool(f"{path}:f", 1, 20.0, memory_gib=gib) as pool:
            assert scored(pool, "-").scores["limit"] == limit


def test_modules_beside_the_file_are_found_and_those_in_the_current_folder_do_not_replace_pythons_own(tmp_path, monkeypatch):
    current, beside = tmp_path / "current", tmp_path / "beside"
    for folder in (current, beside):
        folder.mkdir()
    for name in ("json", "math", "select", "signal", "traceback", "threading", "multiprocessing", "queue", "random", "memrl"):
        (current / f"{name}.py").write_text("raise SystemExit('taken from the current folder')\n")
    (beside / "helpers.py").write_text("value = 0.25\n")
    (beside / "graders.py").write_text("import json, queue, random\nfrom helpers import value\ndef f(r, a, m): return value\n")
    monkeypatch.chdir(current)
    with RewardPool(f"{beside / 'graders.py'}:f", 1, 20.0) as pool:
        assert scored(pool, "-").reward == 0.25
    (current / "graders.py").write_text("import json\ndef f(r, a, m): return float(json.loads('0.75'))\n")
    with RewardPool("graders.py:f", 1, 20.0) as pool:
        assert scored(pool, "-").reward == 0.75


class Hostile(Exception):
    def __str__(self):
        return json.dumps(self)


def test_every_exception_has_a_printable_line():
    assert one_line(Hostile()) == "Hostile, whose message cannot be printed"
    odd = type("two\nlines\x1b", (ValueError,), {})
    assert one_line(odd("a\tb\0")) == "two lines\N{REPLACEMENT CHARACTER}: a b\N{REPLACEMENT CHARACTER}"

    def raise_from(*_):
        raise Hostile from odd()

    assert judge(raise_from, "", [], "any", {})["error"].startswith("Hostile, whose message cannot be printed")


def test_a_pool_without_errors_keeps_its_processes(pool):
    before = pids(pool)
    assert [scored(pool, "good").reward for _ in range(3)] == [0.5] * 3 and pids(pool) == before
