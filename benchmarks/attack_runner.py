"""Run a command on a damaged folder, and judge how it ended: what the attacks of `attacks.py` share.

A process that imports torch takes seconds to start. Here the commands are imported once and every attack is a fork, with its
own standard streams, working folder and figures of CPU time and memory from the kernel. `real` starts `python -m memrl` instead.
"""

import hashlib
import importlib
import os
import pkgutil
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MOST_CPU_S, MOST_MIB = 10.0, 1024  # what an attack may cost
HANGS_S, KILL_MIB = 40.0, 3 * 1024  # the machine may be busy with other work
HASHED = 2**26  # bytes; larger files are compared by size and time
LONGEST_STDERR = 2**19  # characters; what a reward function prints is shown, 64 KiB of each call
KEPT = 20_000
KEY = "sk-correct-horse-battery"
LATE = ("memrl.__main__", "memrl.engine", "memrl.kernels", "memrl.training")  # they import DeepSpeed or nothing new


def nothing(folder: Path) -> None:
    """Damage nothing."""


@dataclass
class Attack:
    """A command line of `memrl` in a folder of good inputs that `damage` has changed.

    Attributes:
        reader: the row of the table that this attack counts for.
        codes: exit codes that are right.
        says: texts of which standard error or output must hold one, if any are given.
        serve: bytes that a server answers with, by a request's first line; `{url}` in the arguments is its address.
        own: beginnings of the names of files that the command may replace: those of its own run folder.
    """

    reader: str
    name: str
    arguments: Sequence[str]
    damage: Callable[[Path], None] = nothing
    codes: tuple[int, ...] = (0, 1, 2)
    says: tuple[str, ...] = ()
    serve: Callable[[bytes], bytes] | None = None
    own: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    reader: str
    name: str
    code: int
    cpu_s: float
    wall_s: float
    mib: float
    more_mib: float
    said: str
    failures: list[str]


class Runner:
    """Runs attacks one by one, each on a copy of `world` in `work`."""

    def __init__(self, world: Path, work: Path, real: bool = False):
        self.world, self.work, self.real, self.count = world, work, real, 0
        self.base_mib = 0.0
        if not real:
            import_commands()
            self.base_mib = self.run(Attack("", "", ["--help"])).mib

    def run(self, attack: Attack) -> Outcome:
        self.count += 1
        folder = self.work / str(self.count)
        shutil.copytree(self.world, folder)
        attack.damage(folder)
        before = contents(folder)
        streams = [self.work / f"{self.count}.{name}" for name in ("out", "err")]
        server, url = serve(attack.serve) if attack.serve else (None, "")
        arguments = [argument.replace("{url}", url) for argument in attack.arguments]
        try:
            start = self._start if self.real else self._fork
            began = time.monotonic()
            status, usage, killed = wait(start(arguments, folder, streams, attack))
            wall_s = time.monotonic() - began
        finally:
            if server is not None:
                os.kill(server, signal.SIGKILL)
                os.waitpid(server, 0)
        printed, said = (stream.read_bytes().decode(errors="backslashreplace") for stream in streams)
        cpu_s, mib = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
        code = os.waitstatus_to_exitcode(status)
        failures = [killed] if killed else []
        failures += [f"{cpu_s:.1f} s of CPU time"] if cpu_s > MOST_CPU_S else []
        failures += [f"{mib:.0f} MiB of memory"] if mib > MOST_MIB else []
        failures += wrong_end(attack, code, printed, said)
        failures += lost(before, contents(folder), folder, attack)
        if KEY in printed + said or any(holds(path, KEY) for path in folder.rglob("*") if path.is_file()):
            failures.append("the key is shown")
        shutil.rmtree(folder, ignore_errors=True)
        return Outcome(attack.reader, attack.name, code, cpu_s, wall_s, mib, mib - self.base_mib, said[-KEPT:], failures)

    def _start(self, arguments: Sequence[str], folder: Path, streams: list[Path], attack: Attack) -> int:
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | attack.environment
        words = [sys.executable, "-m", "memrl", *map(os.fsencode, arguments)]
        with streams[0].open("wb") as out, streams[1].open("wb") as err:
            return subprocess.Popen(
                words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            ).pid

    def _fork(self, arguments: Sequence[str], folder: Path, streams: list[Path], attack: Attack) -> int:
        if pid := os.fork():
            return pid
        run_here(arguments, folder, streams, attack)


def run_here(arguments: Sequence[str], folder: Path, streams: list[Path], attack: Attack) -> NoReturn:
    """In the fork: become the command."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.update(attack.environment)
        flags = os.O_WRONLY | os.O_CREAT
        for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), *(os.open(path, flags) for path in streams))):
            os.dup2(descriptor, number)
        sys.stdin, sys.stdout, sys.stderr = (open(n, "r" if n == 0 else "w", closefd=False) for n in range(3))
        sys.argv = ["memrl", *arguments]
        if attack.serve:
            be_impatient()
        from memrl.__main__ import main

        code = main(list(arguments))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def import_commands() -> None:
    """What the commands import, so that a fork has it; no thread may run here."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    import torch

    import memrl

    torch.set_num_threads(1)
    heavy = [name for _, name, _ in pkgutil.walk_packages(memrl.__path__, "memrl.") if not name.startswith(LATE)]
    for module in ("transformers", "openai", "pyarrow.parquet", "matplotlib.pyplot", *heavy):
        importlib.import_module(module)


def be_impatient() -> None:
    """Let an endpoint's failure take seconds, not the minutes that are spent on a busy server."""
    import memrl.endpoint.remote_llm as remote

    remote.BUDGET_S, remote.LIST_S, remote.CHECK_S = 2.0, 2.0, 2.0
    remote.RemoteLLM.__init__.__kwdefaults__ |= {"timeout": 2.0, "first_wait": 0.05}


def wait(pid: int) -> "tuple[int, resource.struct_rusage, str]":
    """The exit status and the resources of the process, and why it was killed, if it was."""
    began, killed = time.monotonic(), ""
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return status, usage, killed
        mib = resident_mib(pid)
        if not killed and (mib > KILL_MIB or time.monotonic() - began > HANGS_S):
            killed = f"killed at {mib:.0f} MiB" if mib > KILL_MIB else f"killed after {HANGS_S:g} s"
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.005)


def resident_mib(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    except (OSError, IndexError):
        return 0.0


def wrong_end(attack: Attack, code: int, printed: str, said: str) -> list[str]:
    """What is wrong with how the command ended, from its exit code and what it printed."""
    failures = []
    if code not in attack.codes:
        failures.append(f"exit code {code}")
    if "Traceback" in said + printed:
        failures.append("a traceback")
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if len(errors) > 1 or (code == 2 and (not errors or not said.endswith(f"{errors[-1]}\n"))):
        failures.append("not one line of error at the end")
    if code == 1 and not errors and "failed" not in printed + said:
        failures.append("no reason")
    shown = said if any("\x1b" in word for word in attack.arguments) else printed + said  # a name of the user's own is printed
    if any(len(line) > 3000 for line in errors) or "\x1b" in shown or len(said) > LONGEST_STDERR:
        failures.append("a message that is too long, or that controls the terminal")
    if attack.says and not any(words in printed + said for words in attack.says):
        failures.append(f"says none of {', '.join(attack.says)}")
    return failures


def contents(folder: Path) -> dict[str, str]:
    """Every file below the folder with what is in it; what is no file with what it is."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        about = f"{stat.filemode(status.st_mode)} {status.st_size if stat.S_ISREG(status.st_mode) else ''}"
        if stat.S_ISREG(status.st_mode):
            small = status.st_size <= HASHED
            about += hashlib.sha256(path.read_bytes()).hexdigest() if small else str(status.st_mtime_ns)
        found[str(path.relative_to(folder))] = about
    return found


def lost(before: dict[str, str], after: dict[str, str], folder: Path, attack: Attack) -> list[str]:
    """Files that the command deleted or changed, and what code from the folder left if it ran."""
    gone = [name for name, about in before.items() if after.get(name) != about and not name.startswith(attack.own or "\0")]
    return [f"{name} was changed" for name in gone] + ["code was executed"] * any(Path(name).name == "proof" for name in after)


def holds(path: Path, text: str) -> bool:
    return not path.is_symlink() and path.stat().st_size <= HASHED and text.encode() in path.read_bytes()


def serve(reply: Callable[[bytes], bytes]) -> tuple[int, str]:
    """A process that answers every request with `reply(request)`; its id and address."""
    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    if pid := os.fork():
        listener.close()
        return pid, url
    while True:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        request = b""
        while b"\r\n\r\n" not in request or (request[:4] == b"POST" and not request.endswith(b"}")):
            request += connection.recv(2**16) or os._exit(0)
        try:
            connection.sendall(reply(request).replace(b"{url}", url.encode()))
            if b"hang" in reply(request)[:4]:
                time.sleep(60)
        finally:
            os._exit(0)
