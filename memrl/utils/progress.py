"""How far a long command is: a bar on a terminal, a plain line now and then everywhere else.

    with Progress("eval", total=2688, unit="chunks") as progress:
        progress.advance(1, documents="64/128", strict=0.922)

prints, every ten seconds and at the end,

    eval  1344/2688 chunks  50%  documents 64/128  strict 0.922  1:02 elapsed, 1:02 left
"""

import sys
import time
from collections.abc import Callable
from typing import TextIO

EVERY_SECONDS = 10.0


class Progress:
    """Counts work done out of `total` and says how long the rest will take.

    The time left is extrapolated from the pace of this process alone: work that was finished before
    (`start`) tells nothing about it.
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        unit: str = "",
        *,
        start: int = 0,
        stream: TextIO | None = None,
        every: float = EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            label: one word that leads every line.
            total: units of work in all, `start` included; None where nobody knows, which leaves the time out.
            start: units that were finished before.
            stream: standard error by default, so that what a command prints as its result can be piped.
            every: seconds between plain lines.
        """
        self.label, self.total, self.unit = label, total, unit
        self.completed = self._start = start
        self.fields: dict[str, str] = {}
        self._stream = sys.stderr if stream is None else stream
        self._every, self._clock = every, clock
        self._began = self._last_line = clock()
        self._bar = self._bar_task = None
        self._printed = ""
        self._open = False

    def __enter__(self) -> "Progress":
        self._began = self._last_line = self._clock()
        self._open = True
        if self._stream.isatty():
            self._open_bar()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open = False
        if self._bar is not None:
            self._show_bar()
            self._bar.stop()
            self._bar = None
        elif self.line() != self._printed:
            self._print(self.line())

    def advance(self, amount: int = 1, **fields: object) -> None:
        """Count `amount` more units; `fields` are shown beside the count until another call changes them."""
        self.set(self.completed + amount, **fields)

    def set(self, completed: int, **fields: object) -> None:
        """Say how many units are done in all; like `advance` otherwise."""
        self.completed = completed
        if self.total is not None:
            self.total = max(self.total, completed)  # a total may be an estimate
        self.fields.update((name, _show(value)) for name, value in fields.items())
        if self._bar is not None:
            self._show_bar()
        elif self._open and self._clock() - self._last_line >= self._every:
            self._print(self.line())

    def log(self, message: str) -> None:
        """A line of its own that stays, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False)
        else:
            print(message, file=self._stream, flush=True)

    @property
    def seconds_left(self) -> float | None:
        """None while nothing tells: no total, no unit finished in this process yet, or fewer than one in a thousand."""
        done = self.completed - self._start
        if self.total is None or done <= 0 or 1000 * done < self.total:
            return None
        return (self._clock() - self._began) / done * (self.total - self.completed)

    def line(self) -> str:
        """The present state in one line without any colour."""
        return "  ".join(part for part in (self.label, self._count(), self._extra(), self._time()) if part)

    def _extra(self) -> str:
        return "  ".join(f"{name} {value}" for name, value in self.fields.items())

    def _count(self) -> str:
        if self.total is None:
            return f"{self.completed} {self.unit}".rstrip()
        share = f"{self.completed / self.total:.0%}" if self.total else "100%"
        return f"{f'{self.completed}/{self.total} {self.unit}'.rstrip()}  {share}"

    def _time(self) -> str:
        elapsed = f"{format_seconds(self._clock() - self._began)} elapsed"
        if self.total is not None and self.completed >= self.total:
            return elapsed
        left = self.seconds_left
        return elapsed if left is None else f"{elapsed}, {format_seconds(left)} left"

    def _print(self, line: str) -> None:
        self._printed, self._last_line = line, self._clock()
        print(line, file=self._stream, flush=True)

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        console = Console(file=self._stream)
        if not console.is_terminal or console.is_dumb_terminal:
            return
        plain = {"markup": False, "style": "default"}
        self._bar = Bar(
            TextColumn("{task.description}", markup=False, style="bold"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}", **plain),
            TextColumn("{task.fields[extra]}", markup=False, style="cyan"),
            TextColumn("{task.fields[time]}", markup=False, style="dim"),
            console=console,
            refresh_per_second=4,
        )
        self._bar_task = self._bar.add_task(self.label, total=self.total, **self._columns())
        self._bar.start()

    def _columns(self) -> dict[str, str]:
        return {"count": self._count(), "extra": self._extra(), "time": self._time()}

    def _show_bar(self) -> None:
        self._bar.update(self._bar_task, completed=self.completed, total=self.total, **self._columns())


def format_seconds(seconds: float) -> str:
    """`0:07`, `12:30`, `3:05:00`, or `2d 03:00` from a day on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _show(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
