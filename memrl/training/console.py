"""The table that a training run prints: one row per step, and how long the rest will take.

    with StepTable(total=400, start=0) as table:
        table.row(1, metrics, seconds)

        step  reward   valid        kl  grad norm  tokens   tok/s  s/step      left
       1/400   0.542       -     0.149      0.124     3.7   2,140     1.9   0:12:36

A terminal gets a row for every step, above a bar; a log file gets a row every ten seconds at most, and the last one.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from memrl.utils.progress import EVERY_SECONDS, Progress, format_seconds

# Title, width, where the value comes from, how it is written.
_COLUMNS: tuple[tuple[str, int, str, Callable[[float], str]], ...] = (
    ("reward", 6, "reward/mean", "{:.3f}".format),
    ("valid", 6, "validation/reward", "{:.3f}".format),
    ("kl", 8, "loss/kl", "{:.3g}".format),
    ("grad norm", 9, "optim/grad_norm", "{:.3g}".format),
    ("tokens", 6, "rollout/response_tokens", "{:.1f}".format),
    ("tok/s", 7, "tokens_per_s", "{:,.0f}".format),
    ("s/step", 6, "step_s", "{:.1f}".format),
)
_LEFT_WIDTH, _GAP, _ABSENT = 8, "  ", "-"


class _Bar(Progress):
    @property
    def is_shown(self) -> bool:
        return self._bar is not None


class StepTable:
    """Prints what matters of each step, by the names of `docs/metrics.md`.

    The time left is extrapolated from the pace of this process alone: steps of an earlier one (`start`) tell nothing about it.
    """

    def __init__(
        self,
        total: int,
        start: int = 0,
        stream: TextIO | None = None,
        *,
        every: float = EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            total: steps of the run, `start` included.
            start: steps that an earlier process did.
            stream: standard error by default; ranks that should be silent give one that leads nowhere.
            every: seconds between rows where the stream is no terminal.
        """
        # The bar prints no lines of its own where there is no terminal, but for the last one, which says how long it all took.
        self._progress = _Bar("train", total, "steps", start=start, stream=stream, every=math.inf, clock=clock)
        self._total, self._every, self._clock = total, every, clock
        self._step_width = max(len("step"), 2 * len(str(total)) + 1)
        self._last_row, self._waiting = -math.inf, ""
        self._has_header = False
        self._validation: float | None = None

    def __enter__(self) -> "StepTable":
        self._progress.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._waiting:
            self._print(self._waiting)
        self._progress.__exit__(*exception)

    def row(self, step: int, metrics: Mapping[str, float | None], seconds: Mapping[str, float | None]) -> None:
        """Show a step that is done.

        Args:
            step: steps done, this one included.
            metrics: the step's record of metrics.jsonl, "validation/reward" with it where there was a validation. That column
                keeps the last one's score. Missing values and None are shown as a dash.
            seconds: "step_s" and "tokens_per_s" of timing.jsonl.
        """
        self._progress.set(step)
        values = {**metrics, **seconds}
        if values.get("validation/reward") is not None:
            self._validation = values["validation/reward"]
        line = self._line(step, values | {"validation/reward": self._validation})
        if self._progress.is_shown or self._clock() - self._last_row >= self._every:
            self._print(line)
        else:
            self._waiting = line

    def _line(self, step: int, values: Mapping[str, float | None]) -> str:
        cells = [f"{step}/{self._total}".rjust(self._step_width)]
        for _, width, name, show in _COLUMNS:
            value = values.get(name)
            cells.append((_ABSENT if value is None else show(value)).rjust(width))
        left = self._progress.seconds_left
        cells.append((_ABSENT if left is None else format_seconds(left)).rjust(_LEFT_WIDTH))
        return _GAP.join(cells)

    def _print(self, line: str) -> None:
        if not self._has_header:
            titles = [title.rjust(width) for title, width, _, _ in _COLUMNS]
            self._progress.log(_GAP.join(["step".rjust(self._step_width), *titles, "left".rjust(_LEFT_WIDTH)]))
            self._has_header = True
        self._progress.log(line)
        self._last_row, self._waiting = self._clock(), ""
