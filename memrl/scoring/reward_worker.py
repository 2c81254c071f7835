"""A worker process of the reward pool, started with START and the arguments ROOT SOCKET TIMEOUT_S MEMORY_GIB [FILE.py:NAME].

It answers requests [number, response, answers, match, metadata, trajectory] with {"number": number, "scores": {name: number},
"turns": [number], "error": text}, both JSON, over a socket inherited as a file descriptor. Its first message, number 0, says by
"reads" what the function is called with; `trajectory` is null unless the function reads it. Standard output belongs to the reward
function, so its prints cannot be mistaken for replies. The function runs in the main thread, the only one in which Python allows
setting alarms.
"""

import contextlib
import inspect
import json
import math
import os
import reprlib
import resource
import select
import signal
import threading
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from memrl.scoring.scores import verifier_scores
from memrl.utils.plain_text import one_line
from memrl.utils.user_file import load_user_function

# `python -m` would put the current folder first, and a json.py there in the place of Python's own. (-P needs Python 3.11.)
START = (
    "import sys; sys.path[:] = filter(None, sys.path); root = sys.argv.pop(1); root in sys.path or sys.path.insert(0, root); "
    "from memrl.scoring.reward_worker import main; main(*sys.argv[1:])"
)
ORPHAN_GRACE_S = 2.0
LOST_SOCKET = 77  # exit status of a worker whose socket the function has closed
# Groups are compared in fp32, which above a million no longer tells rewards apart that differ by 0.05. The largest honest rewards
# that come to mind are counts of characters and milliseconds.
MAX_REWARD = 1e6
MAX_NUMBERS, MAX_NAME = 1000, 100  # in a returned dict, which is logged with the trajectory; characters of a name


def main(socket_number: str, timeout_s: str, memory_gib: str, specification: str | None = None) -> None:
    socket, limit_s, own = int(socket_number), float(timeout_s), os.getpid()
    prepare_process(float(memory_gib))
    ignore_signals()
    os.set_inheritable(socket, False)
    identity, folder = os.fstat(socket), os.getcwd()
    connection = Connection(socket)
    threading.Thread(target=end_with_parent, args=(socket,), daemon=True).start()
    try:
        function = None if specification is None else load_function(specification)
        reads = "response" if function is None else read_by(function)
        connection.send_bytes(json.dumps({"number": 0, "reads": reads, "error": ""}).encode())
    except ValueError as error:
        connection.send_bytes(json.dumps({"number": 0, "error": str(error)}).encode())
        return
    with contextlib.suppress(EOFError, OSError):  # the trainer is gone
        while True:
            number, *request = json.loads(connection.recv_bytes())
            # The pool kills a call that takes too long. If the pool is gone and the function holds the interpreter lock, so that
            # the thread above cannot run either, this alarm ends the process.
            signal.setitimer(signal.ITIMER_REAL, limit_s + ORPHAN_GRACE_S)
            reply = {"number": number} | judge(function, *request)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if os.getpid() != own:  # the function forked and returned in the child too: only its parent replies
                os._exit(0)
            if not is_same_file(socket, identity):  # closed, or a file of the function's that has got its number
                os._exit(LOST_SOCKET)
            with contextlib.suppress(OSError):  # a deleted folder
                os.chdir(folder)
            connection.send_bytes(json.dumps(reply).encode())


def prepare_process(memory_gib: float) -> None:
    """Limit this process's memory, 0 sets no limit; where memory runs out, the kernel ends it before the trainer."""
    with contextlib.suppress(OSError):  # other systems than Linux
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    if memory_gib:
        limit = int(memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def is_same_file(descriptor: int, identity: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), identity)
    except OSError:
        return False


def ignore_signals() -> None:
    """Leave SIGINT and SIGTERM to the trainer, which needs the rewards of its last step; forked children handle both as usual."""
    for number in (signal.SIGINT, signal.SIGTERM):
        usual = signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs started by the function would inherit
        os.register_at_fork(after_in_child=partial(signal.signal, number, usual))


def end_with_parent(socket: int) -> None:
    """Wait until the other end of the socket is closed, then kill this process and the function's children."""
    poll = select.poll()
    poll.register(socket, 0)  # event mask 0: only a hang-up is reported, never a request
    poll.poll()
    os.killpg(os.getpid(), signal.SIGKILL)


def load_function(specification: str) -> Callable[..., Any]:
    """The reward function `FILE.py:NAME`; a ValueError gives the reason in one line if it cannot be used."""
    function, _ = load_user_function(specification)
    name = specification.rpartition(":")[2]
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{name} is not a plain function: def {name}(response, answers, metadata)")
    reads = read_by(function)
    try:
        inspect.signature(function).bind("", [], {}, **({"prompts": []} if reads == "prompts" else {}))
    except TypeError as error:
        first = "response" if reads == "response" else "trajectory"
        raise ValueError(f"{name} must take ({first}, answers, metadata): {error}") from error
    return function


def read_by(function: Callable[..., Any]) -> str:
    """What a function reads: "response"; "trajectory" if its first parameter is so named; "prompts", all of it, if another is."""
    names = list(inspect.signature(function).parameters)
    if names[:1] != ["trajectory"]:
        return "response"
    return "prompts" if "prompts" in names else "trajectory"


def judge(
    function: Callable | None, response: str, answers: list[str], match: str, metadata: dict, trajectory: dict | None = None
) -> dict[str, Any]:
    """The reply to one request: the verifiers' scores and, if there is a function and no error, the function's numbers."""
    scores, turns = verifier_scores(response, answers, match), []
    if function is None:
        return {"scores": scores, "turns": turns, "error": ""}
    try:
        if trajectory is None:
            numbers = numbers_of(function(response, answers, metadata))
        else:
            result = call_with_trajectory(function, trajectory, answers, metadata)
            numbers, turns = numbers_and_turns(result, len(trajectory["turns"]), scores["strict"])
        return {"scores": scores | numbers, "turns": turns, "error": ""}
    except BaseException as error:
        return {"scores": scores, "turns": [], "error": one_line(error) + _place(error)}


def call_with_trajectory(function: Callable, trajectory: dict, answers: list[str], metadata: dict) -> Any:
    turns = [SimpleNamespace(**turn) for turn in trajectory["turns"]]
    prompts = {"prompts": [turn.prompt for turn in turns]} if read_by(function) == "prompts" else {}
    return function(SimpleNamespace(**(trajectory | {"turns": turns})), answers, metadata, **prompts)


def numbers_and_turns(result: Any, num_turns: int, strict: float) -> tuple[dict[str, float], list[float]]:
    """The numbers by name, and the turns' rewards, of what a function of the trajectory returned.

    A list has one reward for each turn, and the trajectory's is the strict score; a dict may have such a list as "turns". Other
    results have no rewards of turns.
    """
    named = {"reward": strict, "turns": result} if isinstance(result, list | tuple) else result
    if not isinstance(named, dict) or "turns" not in named:
        return numbers_of(named), []
    turns = named["turns"]
    if not isinstance(turns, list | tuple):
        raise TypeError(f"turns is {_short(turns)}, not a list of numbers")
    if len(turns) != num_turns:
        raise ValueError(f"{len(turns)} rewards of turns were returned for a trajectory of {num_turns} turns")
    rewards = [checked_reward(f"the reward of turn {index}", value) for index, value in enumerate(turns)]
    return numbers_of({name: value for name, value in named.items() if name != "turns"}), rewards


def _place(error: BaseException) -> str:
    """Where in the function's own file an exception was raised."""
    try:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        own = [f" ({os.path.basename(file)}:{line})" for file, line, *_ in frames if file == frames[0].filename]
        return own[-1] if own else ""
    except BaseException:  # an exception may define what it likes
        return ""


def numbers_of(result: Any) -> dict[str, float]:
    """The result of a reward function as finite numbers by name, "reward" among them; TypeError or ValueError otherwise."""
    named = result if isinstance(result, dict) else {"reward": result}
    if "reward" not in named:
        raise ValueError('the returned dict has no "reward"')
    if len(named) > MAX_NUMBERS:
        raise ValueError(f"the returned dict has {len(named)} numbers; at most {MAX_NUMBERS} are logged")
    numbers = {}
    for name, value in named.items():
        if not isinstance(name, str) or name in ("strict", "lenient") or len(name) > MAX_NAME:
            raise ValueError(
                f"a score cannot be named {_short(name)}; names are text of at most {MAX_NAME} characters, and strict and "
                "lenient are taken"
            )
        numbers[name] = checked_reward(name, value) if name == "reward" else _finite(name, value)
    return numbers


def _finite(name: str, value: Any) -> float:
    if not hasattr(value, "__float__"):  # float() would parse text too
        raise TypeError(f"{name} is {_short(value)}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}, not a finite number")
    return number


def checked_reward(name: str, value: Any) -> float:
    """The value as a number; TypeError or ValueError if it is no number, not finite or beyond MAX_REWARD."""
    number = _finite(name, value)
    if abs(number) > MAX_REWARD:
        raise ValueError(f"{name} is {number:g}; rewards must be between -{MAX_REWARD:,.0f} and {MAX_REWARD:,.0f}")
    return number


def _short(value: Any) -> str:
    """A value in a few words; of an object only its type, because its address would differ in each message."""
    plain = value is None or isinstance(value, str | bytes | int | float | complex | list | tuple | dict)
    return reprlib.repr(value) if plain else f"of type {type(value).__name__}"
