"""A worker process of the reward pool: `python -m memrl.scoring.reward_worker SOCKET TIMEOUT_S [FILE.py:NAME]`.

It answers requests [response, answers, match, metadata] with {"scores": {name: number}, "error": text}, both JSON, over a socket
inherited as a file descriptor. Standard output belongs to the reward function, so its prints cannot be mistaken for replies. The
function runs in the main thread, the only one in which Python allows setting alarms.
"""

import contextlib
import importlib.util
import inspect
import json
import math
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from memrl.scoring.scores import verifier_scores

ERROR_CHARACTERS = 300
ORPHAN_GRACE_S = 2.0


def main(socket: int, timeout_s: float, specification: str | None) -> None:
    ignore_signals()
    os.set_inheritable(socket, False)
    connection = Connection(socket)
    threading.Thread(target=end_with_parent, args=(socket,), daemon=True).start()
    try:
        function = None if specification is None else load_function(specification)
        connection.send_bytes(json.dumps({"error": ""}).encode())
    except ValueError as error:
        connection.send_bytes(json.dumps({"error": str(error)}).encode())
        return
    with contextlib.suppress(EOFError, OSError):  # the trainer is gone
        while True:
            request = json.loads(connection.recv_bytes())
            # The pool kills a call that takes too long. If the pool is gone and the function holds the interpreter lock, so that
            # the thread above cannot run either, this alarm ends the process.
            signal.setitimer(signal.ITIMER_REAL, timeout_s + ORPHAN_GRACE_S)
            reply = judge(function, *request)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(json.dumps(reply).encode())


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


def load_function(specification: str) -> Callable[[str, list[str], dict], Any]:
    """Load the function `FILE.py:NAME`; a ValueError gives the reason in one line if that fails."""
    path, _, name = specification.rpartition(":")
    if not path.endswith(".py") or not name:
        raise ValueError("write it as FILE.py:NAME")
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}")
    path = os.path.abspath(path)
    sys.path.insert(0, os.path.dirname(path))  # as Python does for a script
    module_spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py"), path)
    assert module_spec is not None and module_spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:  # SystemExit too
        raise ValueError(f"importing the file raised {one_line(error)}") from error
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(f"the file has no {name}; its functions are: {', '.join(functions) or 'none'}")
    function = getattr(module, name)
    if not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
        raise ValueError(f"{name} is not a plain function: def {name}(response, answers, metadata)")
    try:
        inspect.signature(function).bind("", [], {})
    except TypeError as error:
        raise ValueError(f"{name} must take (response, answers, metadata): {error}") from error
    return function


def judge(function: Callable | None, response: str, answers: list[str], match: str, metadata: dict) -> dict[str, Any]:
    """The reply to one request: the verifiers' scores and the function's, if there is one; an error gives "reward" 0."""
    scores = verifier_scores(response, answers, match)
    if function is None:
        return {"scores": scores, "error": ""}
    try:
        return {"scores": scores | numbers_of(function(response, answers, metadata)), "error": ""}
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        own = [f" ({os.path.basename(file)}:{line})" for file, line, *_ in frames if file == frames[0].filename]
        return {"scores": scores | {"reward": 0.0}, "error": one_line(error) + (own[-1] if own else "")}


def numbers_of(result: Any) -> dict[str, float]:
    """The result of a reward function as finite numbers by name, "reward" among them; TypeError or ValueError otherwise."""
    named = result if isinstance(result, dict) else {"reward": result}
    if "reward" not in named:
        raise ValueError('the returned dict has no "reward"')
    numbers = {}
    for name, value in named.items():
        if not isinstance(name, str) or name in ("strict", "lenient"):
            raise ValueError(f"a score cannot be named {name!r}; names are text, and strict and lenient are taken")
        if not hasattr(value, "__float__"):  # float() would parse text too
            raise TypeError(f"{name} is {value!r}, not a number")
        numbers[name] = float(value)
        if not math.isfinite(numbers[name]):
            raise ValueError(f"{name} is {numbers[name]}, not a finite number")
    return numbers


def one_line(error: BaseException) -> str:
    """Type and message in one line of at most ERROR_CHARACTERS."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    return text if len(text) <= ERROR_CHARACTERS else text[: ERROR_CHARACTERS - 3] + "..."


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
