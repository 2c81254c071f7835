"""Rewards from worker processes: every way in which a reward function can go wrong, tried with real processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memrl.scoring.reward_pool import RewardPool
from memrl.scoring.reward_worker import ORPHAN_GRACE_S, judge
from memrl.scoring.scores import verifier_scores
from memrl.types import Sample, Trajectory
from memrl.utils.plain_text import ERROR_CHARACTERS, one_line

REPO = Path(__file__).resolve().parent.parent
RIGHT = "so it is \\boxed{Ed Wood}"
VERIFIERS = {"strict": 1.0, "lenient": 1.0}

FUNCTIONS = r"""import math, os, re, signal, subprocess, sys, threading, time
from decimal import Decimal

def length(response, answers, metadata):
    return len(response) + 1000 * sum(map(len, answers))

def by_metadata(response, answers, metadata):
    return DO[metadata["do"]](response, metadata)

def sleep(response, metadata):
    time.sleep(metadata["seconds"])
    return metadata.get("value", 1.0)

def forever(response, metadata):
    while True:
        pass

def shout(response, metadata):
    print("x" * 2_000_000)
    os.write(1, b"y" * 100_000)
    subprocess.run(["echo", "from a child"])
    return 0.25

def read_input(response, metadata):
    return float(len(subprocess.run(["cat"], capture_output=True).stdout) + len(sys.stdin.read()))

def start_child(response, metadata):
    child = subprocess.Popen(["sleep", "600"])
    with open(metadata["file"], "w") as file:
        file.write(str(child.pid))
    time.sleep(600)

def fork_and_terminate(response, metadata):
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    time.sleep(0.05)
    os.kill(pid, signal.SIGTERM)
    return float(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

def start_and_terminate(response, metadata):
    program = subprocess.Popen(["sleep", "600"])
    program.terminate()
    return float(program.wait())

def alarm(response, metadata):
    def ring(*_):
        raise TimeoutError("rang")
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        time.sleep(600)
    except TimeoutError:
        return 0.75

def raising(error):
    def run(response, metadata):
        raise error
    return run

DO = {
    "sleep": sleep,
    "forever": forever,
    "regex": lambda r, m: re.match("(a+)+$", "a" * 60 + "b"),
    "shout": shout,
    "read input": read_input,
    "start child": start_child,
    "fork and terminate": fork_and_terminate,
    "start and terminate": start_and_terminate,
    "alarm": alarm,
    "raise": raising(ValueError("no\nsuch   thing")),
    "raise without words": raising(KeyError()),
    "raise long": raising(ValueError("w" * 5000)),
    "sys.exit": lambda r, m: sys.exit(3),
    "os._exit": lambda r, m: os._exit(3),
    "segfault": lambda r, m: os.kill(os.getpid(), signal.SIGSEGV),
    "close all": lambda r, m: os.closerange(3, 256),
    "recurse": lambda r, m: DO["recurse"](r, m),
    "nan": lambda r, m: math.nan,
    "inf": lambda r, m: -math.inf,
    "none": lambda r, m: None,
    "text": lambda r, m: "1.0",
    "huge int": lambda r, m: 10**400,
    "true": lambda r, m: True,
    "decimal": lambda r, m: Decimal("0.5"),
    "dict": lambda r, m: {"format": 1, "reward": 0.5, "length": len(r)},
    "dict without reward": lambda r, m: {"format": 1.0},
    "dict with nan": lambda r, m: {"reward": 1.0, "format": math.nan},
    "dict with strict": lambda r, m: {"reward": 1.0, "strict": 1.0},
    "dict with a number for a name": lambda r, m: {"reward": 1.0, 3: 1.0},
    "pid": lambda r, m: {"reward": 0.0, "pid": os.getpid()},
    "modules": lambda r, m: {"reward": 0.0, **{name: 1.0 for name in sys.modules}},
    "hash": lambda r, m: hash(r) % 1000,
    "main thread": lambda r, m: threading.current_thread() is threading.main_thread(),
}
"""


WHERE = {number + 1: text.strip() for number, text in enumerate(FUNCTIONS.splitlines())}
RAISED = next(number for number, text in WHERE.items() if text == "raise error")


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "graders.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture(scope="module")
def pool(functions):
    with RewardPool(f"{functions}:by_metadata", 2, 20.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def hasty(functions):
    with RewardPool(f"{functions}:by_metadata", 1, 0.3) as pool:
        yield pool


async def gather(pool, metadata, response=RIGHT):
    """One trajectory for each metadata, scored all at once."""
    trajectories = [Trajectory(response=response, reward=-1.0, error="stale") for _ in metadata]
    samples = [Sample("s", "q", "", ("Ed Wood",), metadata=one) for one in metadata]
    await asyncio.gather(*(pool.score(t, s) for t, s in zip(trajectories, samples, strict=True)))
    return trajectories


def scored(pool, do, **metadata):
    return asyncio.run(gather(pool, [{"do": do, **metadata}]))[0]


def pids(pool):
    return [worker._process.pid for worker in pool._workers]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid, seconds=20.0):
    deadline = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still running"
        time.sleep(0.02)


# --- What a function may return -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("do", "numbers"),
    [
        ("true", {"reward": 1.0}),
        ("decimal", {"reward": 0.5}),
        ("dict", {"format": 1.0, "reward": 0.5, "length": float(len(RIGHT))}),
        ("main thread", {"reward": 1.0}),
        ("alarm", {"reward": 0.75}),
        ("shout", {"reward": 0.25}),
        ("read input", {"reward": 0.0}),
        ("fork and terminate", {"reward": -float(signal.SIGTERM)}),
        ("start and terminate", {"reward": -float(signal.SIGTERM)}),
    ],
)
def test_a_number_a_bool_or_a_dict_of_numbers_is_a_reward(pool, do, numbers):
    trajectory = scored(pool, do)
    assert (trajectory.scores, trajectory.error) == (VERIFIERS | numbers, "")
    assert trajectory.reward == numbers["reward"]


def test_the_function_gets_response_answers_and_metadata_as_json_holds_them():
    seen = []
    request = ["r", ["a"], "all", {"k": [1, None]}]
    judge(lambda *arguments: seen.append(arguments) or 1, *json.loads(json.dumps(request)))
    assert seen == [("r", ["a"], {"k": [1, None]})]


@pytest.mark.parametrize(
    ("do", "error"),
    [
        ("raise", f"ValueError: no such thing (graders.py:{RAISED})"),
        ("raise without words", f"KeyError (graders.py:{RAISED})"),
        ("sys.exit", "SystemExit: 3"),
        ("recurse", "RecursionError: maximum recursion depth exceeded"),
        ("none", "TypeError: reward is None, not a number"),
        ("text", "TypeError: reward is '1.0', not a number"),
        ("nan", "ValueError: reward is nan, not a finite number"),
        ("inf", "ValueError: reward is -inf, not a finite number"),
        ("huge int", "OverflowError: int too large to convert to float"),
        ("dict without reward", 'ValueError: the returned dict has no "reward"'),
        ("dict with nan", "ValueError: format is nan, not a finite number"),
        ("dict with strict", "ValueError: a score cannot be named 'strict'; names are text"),
        ("dict with a number for a name", "ValueError: a score cannot be named 3"),
        ("os._exit", "ChildProcessError: scoring ended the worker: exit status 3"),
        ("segfault", "ChildProcessError: scoring ended the worker: SIGSEGV"),
        ("close all", "ChildProcessError: scoring ended the worker: the function closed a file descriptor"),
    ],
)
def test_what_is_no_finite_number_is_left_out_and_says_why(pool, do, error):
    trajectory = scored(pool, do)
    assert trajectory.error.startswith(error) and "\n" not in trajectory.error
    assert (trajectory.left_out, trajectory.reward, trajectory.scores) == (True, 0.0, VERIFIERS)


@pytest.mark.parametrize("value", [1e39, -1e39, 1_000_001, 10**300])
def test_a_finite_but_absurd_reward_is_an_error_of_the_function(value):
    """1e39 is infinite in fp32, in which groups are compared."""
    reply = judge(lambda *_: value, "", [], "any", {})
    assert reply["error"].startswith("ValueError: reward is ") and "must be between -1,000,000 and 1,000,000" in reply["error"]
    assert "reward" not in reply["scores"]
    assert judge(lambda *_: {"reward": 1e6, "length": 1e39}, "", [], "any", {})["scores"]["length"] == 1e39


def test_a_reward_that_fails_is_left_out_or_zero_as_the_setting_says(functions):
    for on_error, left_out in (("skip", True), ("zero", False)):
        with RewardPool(f"{functions}:by_metadata", 1, 20.0, on_error) as pool:
            failed, good = asyncio.run(gather(pool, [{"do": "raise"}, {"do": "true"}]))
        assert (failed.left_out, failed.reward, bool(failed.error)) == (left_out, 0.0, True)
        assert (good.left_out, good.reward, good.error) == (False, 1.0, "")


def test_scalars_of_numpy_and_torch_are_numbers():
    import numpy as np
    import torch

    for value in (np.float32(0.5), np.int64(1), np.bool_(True), torch.tensor(0.5)):
        assert judge(lambda *_, value=value: value, "", [], "any", {})["scores"]["reward"] == float(value)


def test_long_errors_are_cut(pool):
    assert len(one_line(ValueError("w" * 5000))) == ERROR_CHARACTERS
    assert "..." in scored(pool, "raise long").error


@pytest.mark.parametrize("do", ["sleep", "forever", "regex"])
def test_a_function_that_takes_too_long_is_killed_and_the_next_score_is_right(hasty, do):
    """The regular expression holds the interpreter lock, so nothing inside the worker could interrupt it."""
    trajectory = scored(hasty, do, seconds=600)
    assert trajectory.error == "TimeoutError: scoring took longer than 0.3 s"
    assert (trajectory.left_out, trajectory.reward, trajectory.scores) == (True, 0.0, VERIFIERS)
    assert scored(hasty, "true").reward == 1.0


def test_what_a_stuck_function_started_is_killed_with_it(hasty, tmp_path):
    assert scored(hasty, "start child", file=str(tmp_path / "pid")).error.startswith("TimeoutError")
    wait_until_gone(int((tmp_path / "pid").read_text()))


def test_bad_scores_among_good_ones_spoil_none_of_them(pool):
    kinds = ["true", "os._exit", "raise", "decimal", "segfault", "nan"] * 4
    trajectories = asyncio.run(gather(pool, [{"do": do} for do in kinds]))
    assert [t.reward for t in trajectories] == [1.0, 0.0, 0.0, 0.5, 0.0, 0.0] * 4
    assert [bool(t.error) for t in trajectories] == [False, True, True, False, True, True] * 4


@pytest.mark.parametrize("value", [threading.Lock(), lambda: 0, {1, 2}, b"bytes"])
def test_metadata_that_json_cannot_hold_is_an_error_of_that_trajectory(pool, value):
    trajectory = scored(pool, "true", extra=value)
    assert "is not JSON serializable" in trajectory.error and trajectory.reward == 0.0
    assert scored(pool, "true").error == ""


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10), st.floats(-1e6, 1e6)), min_size=1, max_size=8))
def test_rewards_do_not_depend_on_the_order_in_which_scores_finish(pool, calls):
    metadata = [{"do": "sleep", "seconds": wait / 1000, "value": value} for wait, value in calls]
    assert [t.reward for t in asyncio.run(gather(pool, metadata))] == [value for _, value in calls]


def test_every_worker_hashes_text_alike(pool, hasty):
    assert scored(pool, "hash").reward == scored(hasty, "hash").reward


@pytest.fixture(scope="module")
def length_pool(functions):
    with RewardPool(f"{functions}:length", 1, 20.0) as pool:
        yield pool


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=60), st.lists(st.text(max_size=5), max_size=3))
def test_any_text_reaches_the_function_as_it_is(length_pool, response, answers):
    trajectory = Trajectory(response=response)
    asyncio.run(length_pool.score(trajectory, Sample("s", "q", "", tuple(answers))))
    assert trajectory.reward == len(response) + 1000 * sum(map(len, answers))


# --- Without a function ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict_pool():
    with RewardPool(None, 2, 20.0) as pool:
        yield pool


@settings(max_examples=50, deadline=None)
@given(
    st.text(alphabet="abE \\boxed{}.\ud800\N{DEGREE SIGN}", max_size=40),
    st.sampled_from([RIGHT, "\\boxed{a, Ed Wood}", ""]),
    st.sampled_from(["any", "all"]),
)
def test_without_a_function_the_verifiers_score(strict_pool, text, end, match):
    trajectory = Trajectory(response=text + end)
    sample = Sample("s", "q", "", ("Ed Wood", "a"), match, {"lock": threading.Lock()})
    asyncio.run(strict_pool.score(trajectory, sample))
    expected = verifier_scores(text + end, sample.answers, match)
    assert (trajectory.scores, trajectory.reward, trajectory.error) == (expected, expected["strict"], "")


@pytest.mark.parametrize(
    ("answers", "match", "response", "strict", "lenient"),
    [
        (("Ed Wood",), "any", "so it is \\boxed{Ed Wood}", 1.0, 1.0),
        (("Ed Wood",), "any", "so it is \\boxed{Ed Wood, director}", 0.0, 1.0),
        (("Ed Wood",), "any", "so it is \\boxed{Tim Burton}", 0.0, 0.0),
        (("Paris", "City of Light"), "any", "so \\boxed{paris}", 1.0, 1.0),
        (("Paris", "City of Light"), "any", "\\boxed{It is Paris}", 0.0, 1.0),
        (("Paris", "City of Light"), "any", "", 0.0, 0.0),
        (("17", "23"), "all", "\\boxed{23, 17}", 1.0, 1.0),
        (("17", "23"), "all", "\\boxed{17 and 23, I think}", 0.0, 1.0),
        (("17", "23"), "all", "\\boxed{17}", 0.0, 0.0),
    ],
)
def test_the_reward_is_the_strict_score_and_both_are_reported(strict_pool, answers, match, response, strict, lenient):
    trajectory = Trajectory(response=response, reward=-5.0, scores={"sections_read": 3.0})
    asyncio.run(strict_pool.score(trajectory, Sample("s", "q", "", answers, match)))
    assert trajectory.scores == {"sections_read": 3.0, "strict": strict, "lenient": lenient}
    assert trajectory.reward == strict


@pytest.mark.parametrize(("match", "strict", "lenient"), [("any", 0.0, 1.0), ("all", 1.0, 1.0)])
def test_the_samples_match_decides_what_is_right(pool, strict_pool, match, strict, lenient):
    sample = Sample("s", "q", "", ("Ed Wood", "Tim Burton"), match, {"do": "true"})
    for rewards in (pool, strict_pool):
        trajectory = Trajectory(response="\\boxed{Tim Burton and Ed Wood}")
        asyncio.run(rewards.score(trajectory, sample))
        assert (trajectory.scores["strict"], trajectory.scores["lenient"]) == (strict, lenient)


def test_the_verifiers_reward_outlives_a_worker_that_is_killed_while_it_scores(strict_pool):
    """Stopped workers take the request and never answer; what they were asked is known without them."""

    async def go():
        stopped = pids(strict_pool)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        trajectory = Trajectory(response="\\boxed{a, Ed Wood}")
        scoring = asyncio.ensure_future(strict_pool.score(trajectory, Sample("s", "q", "", ("Ed Wood", "a"), "all")))
        await asyncio.sleep(0.1)
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)
        await scoring
        return trajectory

    trajectory = asyncio.run(go())
    assert (trajectory.scores, trajectory.reward, trajectory.error) == (VERIFIERS, 1.0, "")


# --- Event loops ----------------------------------------------------------------------------------------------


def test_the_event_loop_goes_on_while_scores_are_slow(pool):
    async def go():
        scoring = asyncio.ensure_future(gather(pool, [{"do": "sleep", "seconds": 0.5}] * 2))
        ticks = 0
        while not scoring.done():
            await asyncio.sleep(0)
            ticks += 1
        return ticks, [t.reward for t in await scoring]

    ticks, rewards = asyncio.run(go())
    assert rewards == [1.0, 1.0] and ticks > 100


def test_a_score_that_is_cancelled_does_not_disturb_the_next_event_loop(pool):
    before = pids(pool)

    async def give_up():
        await asyncio.wait_for(gather(pool, [{"do": "sleep", "seconds": 0.4}] * 4), timeout=0.1)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(give_up())
    assert [t.reward for t in asyncio.run(gather(pool, [{"do": "decimal"}] * 6))] == [0.5] * 6
    assert pids(pool) == before


# --- Processes ------------------------------------------------------------------------------------------------


def test_workers_load_nothing_heavy(pool):
    assert "json" in scored(pool, "modules").scores
    assert not {"torch", "numpy", "transformers", "deepspeed"} & set(scored(pool, "modules").scores)


def test_workers_are_reused(pool):
    before = pids(pool)
    trajectories = asyncio.run(gather(pool, [{"do": "pid"}] * 20))
    assert {t.scores["pid"] for t in trajectories} <= set(before) and pids(pool) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_leave_ctrl_c_and_sigterm_to_the_trainer(pool, number):
    async def go():
        scoring = asyncio.ensure_future(gather(pool, [{"do": "sleep", "seconds": 0.3}] * 2))
        await asyncio.sleep(0.1)
        for pid in pids(pool):
            assert os.getpgid(pid) != os.getpgrp()  # a terminal sends to the trainer's group
            os.kill(pid, number)
        return await scoring

    before = pids(pool)
    assert [(t.reward, t.error) for t in asyncio.run(go())] == [(1.0, "")] * 2
    assert pids(pool) == before


def test_an_idle_worker_that_was_killed_costs_no_reward(pool):
    before = pids(pool)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    for worker in pool._workers:
        assert worker._connection.poll(20)
    assert [t.error for t in asyncio.run(gather(pool, [{"do": "sleep", "seconds": 0.1}] * 2))] == ["", ""]
    assert not set(before) & set(pids(pool))


def test_a_worker_that_cannot_be_started_again_is_an_error_until_it_can(tmp_path):
    file = tmp_path / "changing.py"
    good = "import os\ndef f(response, answers, metadata):\n    return 1.0 if answers else os._exit(1)\n"
    file.write_text(good)
    with RewardPool(f"{file}:f", 1, 20.0) as pool:

        def error(answers):
            trajectory = Trajectory()
            asyncio.run(pool.score(trajectory, Sample("s", "q", "", answers)))
            return trajectory.error

        assert error(()) == "ChildProcessError: scoring ended the worker: exit status 1"
        file.write_text("import nowhere_to_be_found")
        for _ in range(2):
            assert "importing the file raised ModuleNotFoundError" in error(("a",))
        file.write_text(good)
        assert error(("a",)) == ""


def test_closing_ends_what_is_being_scored_and_leaves_no_process(functions):
    with RewardPool(f"{functions}:by_metadata", 2, 600.0) as pool:
        workers = pids(pool)

        async def give_up():
            await asyncio.wait_for(gather(pool, [{"do": "sleep", "seconds": 600}] * 5), timeout=0.1)

        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(give_up())
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)  # not even as zombies
    with pytest.raises(RuntimeError):
        scored(pool, "true")


def test_closing_starts_nothing_that_was_waiting(functions):
    pool = RewardPool(f"{functions}:by_metadata", 2, 20.0)
    trajectories = [Trajectory(reward=-1.0) for _ in range(8)]
    sample = Sample("s", "q", "", (), metadata={"do": "sleep", "seconds": 0.5})

    async def go():
        scoring = [asyncio.ensure_future(pool.score(trajectory, sample)) for trajectory in trajectories]
        await asyncio.sleep(0.1)
        pool.close()
        await asyncio.gather(*scoring, return_exceptions=True)

    asyncio.run(go())
    assert all(t.error or t.reward == -1.0 for t in trajectories)


SCRIPT = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from memrl.scoring.reward_pool import RewardPool
from memrl.types import Sample, Trajectory

pool = RewardPool(sys.argv[2], 2, 0.5 if sys.argv[3] == "regex" else 600.0)
print(*(worker._process.pid for worker in pool._workers), flush=True)

async def go(do):
    sample = Sample("s", "q", "", (), metadata={"do": do, "seconds": 600})
    await asyncio.gather(*(pool.score(Trajectory(), sample) for _ in range(2)))

asyncio.run(go(sys.argv[3]))
"""


def run_script(functions, folder, do):
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", str(REPO), f"{functions}:by_metadata", do]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def resting(functions):
    """A pool with a time limit of 0.3 s, after one score; its processes; and when it has rested longer than any limit."""
    with RewardPool(f"{functions}:by_metadata", 1, 0.3) as pool:
        assert scored(pool, "true").error == ""
        yield pool, pids(pool), time.monotonic() + 0.3 + ORPHAN_GRACE_S + 0.2


def test_a_script_that_forgets_to_close_ends_and_leaves_no_process(functions, tmp_path):
    process = run_script(functions, tmp_path, "true")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    for pid in out.split():
        wait_until_gone(int(pid))


@pytest.mark.parametrize("do", ["sleep", "forever", "regex"])
def test_workers_end_when_the_trainer_is_killed(functions, tmp_path, resting, do):
    """`resting` rests meanwhile, which spares the next test the wait."""
    process = run_script(functions, tmp_path, do)
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    time.sleep(0.2)
    assert all(map(is_running, workers))
    process.kill()
    process.communicate()
    for pid in workers:
        wait_until_gone(pid)


def test_a_worker_outlives_the_time_limit_of_its_last_score(resting):
    pool, before, rested = resting
    time.sleep(max(0.0, rested - time.monotonic()))
    assert scored(pool, "true").error == "" and pids(pool) == before


# --- Mistakes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (None, "f", "there is no file"),
        ("x = 1", "f", "the file has no f; its functions are: none"),
        ("def g(a, b, c): pass", "f", "the file has no f; its functions are: g"),
        ("f = 1", "f", "f is not a plain function"),
        ("class f: pass", "f", "f is not a plain function"),
        ("async def f(a, b, c): pass", "f", "f is not a plain function"),
        ("def f(response): pass", "f", "f must take (response, answers, metadata): too many positional arguments"),
        ("def f(a, b, c):", "f", "importing the file raised IndentationError"),
        ("import nowhere_to_be_found", "f", "importing the file raised ModuleNotFoundError"),
        ("raise SystemExit(1)", "f", "importing the file raised SystemExit: 1"),
        ("import os; os._exit(7)", "f", "importing the file ended the worker: exit status 7"),
        ("def f(a, b, c): pass", "", "write it as FILE.py:NAME"),
    ],
)
def test_a_function_that_cannot_be_had_is_one_clear_line(tmp_path, source, name, message):
    file = tmp_path / "mistake.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(ValueError) as caught:
        RewardPool(f"{file}:{name}", 1, 1.0)
    assert str(caught.value).startswith(f"reward.function {file}:{name}: {message}")
    assert "\n" not in str(caught.value)


def test_the_files_folder_can_be_imported_from_and_the_function_may_be_any_callable(tmp_path):
    (tmp_path / "my_helpers.py").write_text("def double(x): return 2 * x")
    (tmp_path / "mine.py").write_text(
        "from functools import partial\nfrom my_helpers import double\nf = partial(lambda n, r, a, m: double(n), 0.25)\n"
    )
    with RewardPool(f"{tmp_path / 'mine.py'}:f", 1, 20.0) as pool:
        assert asyncio.run(gather(pool, [{}]))[0].reward == 0.5


@pytest.mark.parametrize(
    ("workers", "timeout_s", "message"),
    [
        (0, 1.0, "reward.workers is 0; it must be at least 1"),
        (1, 0.0, "reward.timeout_s is 0.0; it must be above 0"),
        (1, float("nan"), "reward.timeout_s is nan"),
        (1, float("inf"), "reward.timeout_s is inf"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(workers, timeout_s, message):
    with pytest.raises(ValueError, match=message):
        RewardPool(None, workers, timeout_s)


def test_the_first_kinds_of_errors_are_printed_once(functions, capsys):
    with RewardPool(f"{functions}:by_metadata", 2, 20.0) as pool:
        for do in ("raise", "nan", "none", "sys.exit", "inf", "text", "dict without reward"):
            assert scored(pool, do).error and scored(pool, do).error
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert lines[0] == (f"reward function {functions}:by_metadata: ValueError: no such thing (graders.py:{RAISED}); left out")
    assert lines[-1].endswith("further kinds of errors are counted, not printed")


def test_every_option_of_the_rewards_reaches_the_pool(monkeypatch):
    from memrl.config import RewardOptions
    from memrl.training import run

    monkeypatch.setattr(run, "RewardPool", lambda *arguments: arguments)
    assert run.start_rewards(RewardOptions("f.py:g", 3, 7.0, 1.5, "zero")) == ("f.py:g", 3, 7.0, "zero", 1.5)
