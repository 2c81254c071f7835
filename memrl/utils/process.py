"""How a command's process ends: by signals, and when what it prints cannot be written."""

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

SAME_REQUEST_S = 1.0  # a job system may send its signal to the process and to its group


class OutputError(Exception):
    """Standard output cannot be written. Not an OSError, so that nothing takes it for a mistake in a file."""


class _Stream(io.TextIOWrapper):
    """A standard stream on the same buffer that calls `failed` for what cannot be written, and prints ? for unknown letters."""

    def __init__(self, stream: io.TextIOWrapper, errors: str, failed: Callable[[OSError], None]):
        super().__init__(stream.buffer, stream.encoding, errors, line_buffering=stream.line_buffering, write_through=True)
        self._failed = failed

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._failed(error)


def _raise(error: OSError) -> NoReturn:
    raise OutputError(error.strerror) from error


def run_command(command: Callable[..., int], *arguments: Any) -> int:
    """Run a command as a process does; returns its exit code.

    Standard output that cannot be written (a closed pipe, a full disk) ends it with one line and exit code 1, Ctrl-C with 130.
    What cannot be written to standard error is dropped: a full log must not end hours of work.
    """
    if sys.stdout is None:
        print("error: standard output is closed; send it to a file or to /dev/null", file=sys.stderr)
        return 2
    standard = sys.stdout, sys.stderr
    sys.stderr = sys.stderr or open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _Stream(sys.stdout, "replace", _raise)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _Stream(sys.stderr, "backslashreplace", lambda error: None)
    try:
        try:
            return command(*arguments)
        finally:
            sys.stdout.flush()
    except OutputError as error:
        # Python writes what is left in the buffer once more when it ends.
        with contextlib.suppress(OSError, io.UnsupportedOperation):
            os.dup2(os.open(os.devnull, os.O_WRONLY), standard[0].fileno())
        print(f"error: standard output cannot be written: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Stream):
                with contextlib.suppress(OSError, OutputError):
                    stream.detach()  # or it would close the buffer with itself
        sys.stdout, sys.stderr = standard


class StopSignals(contextlib.AbstractContextManager):
    """Inside of the block SIGTERM and SIGHUP do what Ctrl-C does, unless they are ignored: they raise KeyboardInterrupt.

    Attributes:
        number: of the signal that came; SIGINT's if none did.
    """

    def __enter__(self):
        self.number, self._since = int(signal.SIGINT), time.monotonic()
        numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) == signal.SIG_DFL]
        self._before = {each: signal.getsignal(each) for each in (signal.SIGINT, *numbers)}
        for each in numbers:
            signal.signal(each, self._stop)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def end_at_next(self) -> None:
        """From here on a signal ends the process at once: call it when the first one has arrived."""
        self._since = time.monotonic()
        for number in self._before:
            signal.signal(number, self._end)

    def _stop(self, number: int, frame: Any) -> None:
        interrupt = signal.getsignal(signal.SIGINT)  # inside of asyncio.run its own, which cancels what runs
        self.number = number
        self.end_at_next()
        if callable(interrupt):
            interrupt(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt

    def _end(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT or time.monotonic() - self._since > SAME_REQUEST_S:
            os._exit(128 + number)
