"""Score responses in worker processes, so that a slow or broken reward function neither stalls nor ends a run.

    score() -> a thread per worker sends one response at a time and waits -> `reward_worker.py`, one process per worker

The threads only wait, so any number of event loops may come and go, and the time limit holds while the sampler computes. The
built-in verifiers use the workers for long responses: 4,500 characters take up to 2.5 ms, seconds for a batch of 2,048, while
sending them costs the trainer's process 0.2 to 0.35 ms; a short response takes 0.02 ms (measured on two busy cores).
"""

import asyncio
import contextlib
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import IO

from memrl.scoring.reward_worker import LOST_SOCKET, START, checked_reward
from memrl.scoring.scores import verifier_scores
from memrl.types import Sample, Trajectory
from memrl.utils.plain_text import one_line

START_LIMIT_S = 120.0  # to import the reward function's file, which may load libraries
ERRORS_PRINTED = 5
MAX_REPLY = 2**20  # bytes; honest replies have some hundred
OUTPUT_LIMIT = 2**16  # bytes that a call may print; the rest is read and dropped, so that it fills no log and blocks no function
SHORT = 400  # characters that take the verifiers less time than sending them to a worker


class RewardPool(contextlib.AbstractContextManager):
    """Scores trajectories by a reward function, or by the strict verifier.

    `decode` gives the text of prompts, for functions that read them; set it before the first score.

    If the function raises, returns anything but finite numbers, or exceeds the time limit, the trajectory gets an `error` and is
    left out, or gets reward 0; a worker that is stuck or dead is replaced.
    """

    decode: Callable[[list[int]], str] = staticmethod(str)

    def __init__(self, function: str | None, workers: int, timeout_s: float, on_error: str = "skip", memory_gib: float = 0.0):
        """Start the workers; a ValueError in one line if the function cannot be loaded or a number is out of range.

        Args:
            function: `FILE.py:NAME`, see docs/rewards.md; None is the strict verifier.
            workers: number of processes; each imports the file once.
            timeout_s: limit for one call of the function, in seconds.
            on_error: "skip" leaves a trajectory without a reward out; "zero" gives it reward 0.
            memory_gib: limit for each worker; 0 sets none.
        """
        if workers < 1:
            raise ValueError(f"reward.workers is {workers}; it must be at least 1")
        if not 0 < timeout_s <= 86_400:
            raise ValueError(f"reward.timeout_s is {timeout_s}; it must be above 0 and at most 86400, a day")
        self._function, self._on_error = function, on_error
        self._printed: set[str] = set()
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        try:
            for _ in range(workers):  # start all before waiting for the first
                self._workers.append(_Worker(function, timeout_s, memory_gib))
            for worker in self._workers:
                worker.wait_until_ready()
                self._idle.put(worker)
        except BaseException as error:
            for worker in self._workers:
                worker.discard()
            if isinstance(error, (ChildProcessError, TimeoutError)):
                raise ValueError(f"reward.function {function}: {error}") from error
            raise
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")

    async def score(self, trajectory: Trajectory, sample: Sample) -> None:
        """Set `reward`, `scores`, `error` and `left_out`, and the turns' `reward` if the function returned them, in place.

        `scores` has "strict" and "lenient"; with a function also "reward" and the other numbers that it returned. The event loop
        goes on meanwhile.
        """
        turns: list[float] = []
        if self._function is None and len(trajectory.response) <= SHORT:
            scores, error = verifier_scores(trajectory.response, sample.answers, sample.match), ""
        else:
            reply = await asyncio.wrap_future(self._threads.submit(self._call, trajectory, sample))
            scores, turns, error = reply["scores"], reply["turns"], reply["error"]
        whose = f"reward function {self._function}"
        try:
            set_turn_rewards(trajectory, turns)
        except (TypeError, ValueError) as fault:
            whose, error = (whose, error) if error else ("the agent", one_line(fault))
        own, trajectory.error = trajectory.scores, error
        trajectory.reward = 0.0 if error else scores["strict" if self._function is None else "reward"]
        trajectory.scores = own | scores
        trajectory.left_out = bool(error) and self._on_error == "skip"
        if error:
            what = "left out" if self._on_error == "skip" else "reward 0"
            self._tell(f"{whose}: {error}; {what}")

    def leave_out(self, error: str) -> Trajectory:
        """A trajectory without turns and reward, for an agent that failed."""
        self._tell(f"{error}; left out")
        return Trajectory(scores=verifier_scores("", []), error=error, left_out=True)

    def _tell(self, line: str) -> None:
        """Print a kind of error once."""
        if line not in self._printed and len(self._printed) < ERRORS_PRINTED:
            self._printed.add(line)
            note = "; further kinds of errors are counted, not printed" if len(self._printed) == ERRORS_PRINTED else ""
            print(f"{line}{note}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Kill all workers at once; scores in progress are lost."""
        for worker in self._workers:
            worker.retire()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.discard()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, trajectory: Trajectory, sample: Sample) -> dict:
        """The worker's reply. Runs in one of as many threads as there are workers, so a worker is always idle."""
        worker = self._idle.get()
        try:
            return worker.ask(self._request(trajectory, sample, worker.reads))
        except Exception as error:  # any failure here is this trajectory's error; the run continues
            scores = verifier_scores(trajectory.response, sample.answers, sample.match)
            return {"scores": scores, "turns": [], "error": "" if self._function is None else one_line(error)}
        finally:
            self._idle.put(worker)

    def _request(self, trajectory: Trajectory, sample: Sample, reads: str) -> list:
        """What a worker is sent: of the trajectory no more than the function reads, because prompts are long."""
        # The verifiers do not read metadata, so it is not sent to them.
        metadata = {} if self._function is None else sample.metadata
        request = [trajectory.response, list(sample.answers), sample.match, metadata]
        if reads == "response":
            return [*request, None]
        turns: list[dict] = [
            {name: getattr(turn, name) for name in ("kind", "text", "finish_reason", "memory", "reward")}
            | {"tokens": len(turn.response_ids)}
            for turn in trajectory.turns
        ]
        if reads == "prompts":
            for record, turn in zip(turns, trajectory.turns, strict=True):
                record["prompt"] = self.decode(turn.prompt_ids)
        return [*request, {"response": trajectory.response, "memory": trajectory.memory, "turns": turns}]


def set_turn_rewards(trajectory: Trajectory, returned: list[float]) -> None:
    """Set the turns' rewards to what the reward function returned; of an empty list, check those that the agent gave.

    Raises TypeError or ValueError if the agent gave what is no reward; all are 0 then.
    """
    rewards = returned or [turn.reward for turn in trajectory.turns]
    for turn in trajectory.turns:
        turn.reward = 0.0
    rewards = [checked_reward(f"the reward of turn {index}", reward) for index, reward in enumerate(rewards)]
    for turn, reward in zip(trajectory.turns, rewards, strict=True):
        turn.reward = reward


class _Worker:
    """A process that is started again after it died. One thread at a time uses it; any thread may call `retire`."""

    def __init__(self, function: str | None, timeout_s: float, memory_gib: float):
        self._arguments = [str(timeout_s), str(memory_gib), *([] if function is None else [function])]
        self._timeout_s, self._room = timeout_s, OUTPUT_LIMIT
        self._retired, self._lock = False, threading.Lock()
        self._spawn()

    def _spawn(self) -> None:
        # A function may iterate over a set; without this the order would differ between workers.
        environment = {"PYTHONHASHSEED": "0"} | os.environ
        with self._lock:
            if self._retired:
                raise RuntimeError("the reward pool is closed")
            self._number = 0
            self._connection, remote = Pipe()
            # A worker that neither reads nor writes on (stopped, or its interpreter lock is held) must not hold up the thread.
            _limit_waiting(self._connection.fileno(), self._timeout_s)
            with remote:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-c", START, str(Path(__file__).parents[2]), str(remote.fileno()), *self._arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[remote.fileno()],
                    env=environment,
                    start_new_session=True,  # Ctrl-C goes to the trainer alone, and the function's children can be killed too
                )
        threading.Thread(target=self._show_output, args=(self._process.stdout,), daemon=True).start()

    def _show_output(self, pipe: IO[bytes]) -> None:
        """Copy what a worker prints to standard error, up to OUTPUT_LIMIT bytes of each call."""
        with pipe, contextlib.suppress(OSError, ValueError):
            while data := os.read(pipe.fileno(), OUTPUT_LIMIT):
                shown, self._room = data[: self._room], max(0, self._room - len(data))
                if shown:
                    os.write(2, shown)
                    if not self._room:
                        os.write(2, b"\n(this call of the reward function prints more, which is not shown)\n")

    def wait_until_ready(self) -> None:
        reply = self._receive("importing the file", START_LIMIT_S)
        if reply["error"]:
            self.discard()
            raise ChildProcessError(reply["error"])
        self.reads: str = reply["reads"]  # "response", "trajectory" or "prompts"

    def ask(self, request: list) -> dict:
        """Send one request and return the reply; TimeoutError or ChildProcessError without one."""
        # An idle worker sends nothing: only the end of a dead one can be read (killed by the kernel for memory, for example).
        if self._connection.closed or self._connection.poll():
            self.discard()
            self._spawn()
            self.wait_until_ready()
        self._number, self._room = self._number + 1, OUTPUT_LIMIT
        message = json.dumps([self._number, *request]).encode()
        try:
            self._connection.send_bytes(message)
        except BlockingIOError:
            self.discard()
            raise TimeoutError(f"the worker took no request for {self._timeout_s:g} s") from None
        except OSError:
            pass  # a broken pipe; `_receive` reports the cause
        return self._receive("scoring", self._timeout_s)

    def _receive(self, doing: str, limit_s: float) -> dict:
        try:
            if self._connection.poll(limit_s):
                reply = json.loads(self._connection.recv_bytes(MAX_REPLY))
                if reply["number"] == self._number:
                    return reply
                raise ValueError
        except (EOFError, ConnectionError):
            self.discard()
            raise ChildProcessError(f"{doing} ended the worker: {self._end()}") from None
        except (OSError, ValueError, TypeError, LookupError):
            self.discard()
            raise ChildProcessError(f"{doing} wrote into the worker's own connection") from None
        self.discard()
        raise TimeoutError(f"{doing} took longer than {limit_s:g} s")

    def _end(self) -> str:
        status = self._process.returncode
        if status == LOST_SOCKET:
            return "the function closed a file descriptor that it did not open"
        return f"exit status {status}" if status >= 0 else signal.Signals(-status).name

    def retire(self) -> None:
        """Kill the process and start no other."""
        with self._lock:
            self._retired = True
            self._kill()

    def discard(self) -> None:
        """Kill the process and its children, and close the connection."""
        self._kill()
        self._connection.close()

    def _kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it is exiting, and keeps its own exit status
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _limit_waiting(descriptor: int, limit_s: float) -> None:
    """Let reads and writes of a socket that wait longer than `limit_s` raise BlockingIOError."""
    with socket.socket(fileno=os.dup(descriptor)) as own:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            own.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(limit_s), 1 + int(limit_s % 1 * 999_998)))
