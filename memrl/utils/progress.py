"""Show the progress of a long command: a bar on a terminal, elsewhere a plain line every ten seconds and at the end.

with Progress("eval", total=2688, unit="chunks") as progress:
    progress.advance(1, documents="64/128", strict=0.922)

eval  1344/2688 chunks  50%  documents 64/128  strict 0.922  1:02 elapsed, 1:02 left
"""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.live import Live

EVERY_SECONDS = 10.0


class Progress:
    """Counts finished units and estimates the time left from the pace of this process, without the units of an earlier one."""

    def __init__(
        self,
        label: str,
        total: int | None = None,
        unit: str = "",
        *,
        start: int = 0,
        at_once: int = 1,
        stream: TextIO | None = None,
        every: float = EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`start` of the `total` units were finished by an earlier process; without a total no time left is shown.

        Args:
            at_once: units that are worked on at the same time. They often end together, in bursts, so the pace is measured over
                whole rounds of that many.
            stream: standard error by default, so that a command's result can be piped.
            every: seconds between plain lines.
        """
        self.label, self.total, self.unit = label, total, unit
        self.completed = self._start = start
        self._at_once, self._times = at_once, [0.0]  # when the first of `at_once` units ended
        self.fields: dict[str, str] = {}
        self._stream = sys.stderr if stream is None else stream
        self._every, self._clock = every, clock
        self._began = self._last_line = self._advanced = clock()
        self.bar: Live | None = None
        self._printed = ""
        self._open = False

    def __enter__(self):
        self._began = self._last_line = self._advanced = self._clock()
        self._open = True
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream)
            if console.is_terminal and not console.is_dumb_terminal:
                self.bar = Live(get_renderable=self._render, console=console, refresh_per_second=4)
                self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open = False
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        elif self.line() != self._printed:
            self._print(self.line())

    def advance(self, amount: int = 1, **fields: object) -> None:
        """Count `amount` more units; `fields` are shown beside the count until a later call changes them."""
        self.set(self.completed + amount, **fields)

    def set(self, completed: int, **fields: object) -> None:
        """Set the number of finished units; otherwise as `advance`."""
        if completed > self.completed:
            self._advanced = self._clock()
            new = min(completed - self._start, self._at_once - 1) + 1 - len(self._times)
            self._times += [self._advanced - self._began] * new
        self.completed = completed
        if self.total is not None:
            self.total = max(self.total, completed)  # a total may be an estimate
        for name, value in fields.items():
            self.fields[name] = f"{value:.3g}" if isinstance(value, float) else str(value)
        if self._open and self.bar is None and self._clock() - self._last_line >= self._every:
            self._print(self.line())

    def log(self, message: str) -> None:
        """Print a line that stays, above the bar if there is one."""
        if self.bar is not None:
            self.bar.console.print(message, markup=False, highlight=False)
        else:
            print(message, file=self._stream, flush=True)

    @property
    def seconds_left(self) -> float | None:
        """None without a total, and until this process has finished a first round and at least a thousandth of the total.

        The pace is that of whole rounds, up to the last unit that ended; the time since then has passed already.
        """
        done = self.completed - self._start
        rounds, rest = divmod(done, self._at_once)
        if self.total is None or rounds < 1 or 1000 * done < self.total:
            return None
        seconds_each = (self._advanced - self._began - self._times[rest]) / (rounds * self._at_once)
        return max(0.0, seconds_each * (self.total - self.completed) - (self._clock() - self._advanced))

    def line(self) -> str:
        """The present state as one plain line."""
        return "  ".join(part for part in (self.label, *self._parts()) if part)

    def _parts(self) -> tuple[str, str, str]:
        count = f"{self.completed} {self.unit}".rstrip()
        if self.total is not None:
            share = f"{self.completed / self.total:.0%}" if self.total else "100%"
            count = f"{f'{self.completed}/{self.total} {self.unit}'.rstrip()}  {share}"
        elapsed, left = f"{format_seconds(self._clock() - self._began)} elapsed", self.seconds_left
        is_complete = self.total is not None and self.completed >= self.total
        extra = "  ".join(f"{name} {value}" for name, value in list(self.fields.items()))  # another thread may be drawing the bar
        return count, extra, elapsed if left is None or is_complete else f"{elapsed}, {format_seconds(left)} left"

    def _print(self, line: str) -> None:
        self._printed, self._last_line = line, self._clock()
        print(line, file=self._stream, flush=True)

    def _render(self):
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(self.total, self.completed, width=24)
        count, extra, elapsed = self._parts()
        parts = (count, (f"  {extra}" if extra else "", "cyan"), (f"  {elapsed}", "dim"))
        row.add_row(Text(self.label, "bold", no_wrap=True), bar, Text.assemble(*parts, no_wrap=True, overflow="ellipsis"))
        return row


def format_seconds(seconds: float) -> str:
    """`0:07`, `12:30`, `3:05:00`, or `2d 03:00` from a day on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
