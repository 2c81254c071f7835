"""Stop a run when it is asked to: finish the step, save, leave.

SIGTERM and SIGINT reach the ranks at different times, or only one of them, so what a rank was told decides nothing by itself:
once a step all ranks compare (`agreed`), and all of them stop after the same step.

torchrun passes both signals on to its workers and kills what still runs 30 seconds later; a run whose steps take longer needs
`torchrun --shutdown-timeout SECONDS` (or TORCH_ELASTIC_SHUTDOWN_TIMEOUT) to be stopped this way.
"""

import os
import signal
import sys
import threading
import time

from memrl.engine import distributed

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A job system signals every process and torchrun passes on what it got, so one request can arrive twice, so many seconds apart.
SAME_REQUEST_S = 2.0


class GracefulStop:
    """Takes over SIGINT and SIGTERM of this process; make one, in the main thread.

    Outside the steps (between `begin_step` and `end`) a signal ends the process at once, with exit code 128 + its number. Within
    them the first one only asks; a second one ends the process at once.

    Attributes:
        signal: what the ranks agreed to stop for, a signal's number; 0 while nobody asked.
    """

    def __init__(self, advice: str):
        """
        Args:
            advice: how to resume, told to whoever stopped the run.
        """
        self.signal = 0
        self._advice = advice
        self._step: int | None = None
        self._compared: int | None = None  # the last step after which the ranks compared
        self._asked, self._asked_at = 0, 0.0
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        # Python's own handlers wait until a collective returns, which may take as long as the slowest rank's rollouts. The number
        # of a signal is written to this pipe at once, and a thread answers.
        listener, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_forget_signals)
        threading.Thread(target=self._listen, args=(listener,), name="signals", daemon=True).start()

    def begin_step(self, step: int) -> None:
        """From here on a signal lets step `step` (counted from 1) be finished and saved."""
        self._step = step

    def end(self) -> None:
        """From here on there is nothing to finish."""
        self._step = None

    def agreed(self) -> bool:
        """Whether all ranks stop after this step; collective over ranks."""
        self.signal = distributed.max_over_ranks(self._asked)
        if self.signal and not self._asked:
            self._note(self.signal)
        self._compared = self._step
        return self.signal != 0

    @property
    def exit_code(self) -> int:
        """0, or 128 + the signal's number: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signal if self.signal else 0

    def _listen(self, listener: int) -> None:
        while True:
            for number in os.read(listener, 64):
                if number in SIGNALS:
                    self._hear(number)

    def _hear(self, number: int) -> None:
        if self._step is None or (self._asked and time.monotonic() - self._asked_at > SAME_REQUEST_S):
            _say(f"stopped at once; {self._advice}")
            os._exit(128 + number)  # other ranks may be waiting in a collective that no longer comes
        if not self._asked:
            self._note(number)

    def _note(self, number: int) -> None:
        self._asked, self._asked_at = number, time.monotonic()
        # Once the ranks have compared, the step is done: what follows is saving it, the next one, or the end of the run.
        doing = f"finishing step {self._step}, then saving" if self._compared != self._step else "stopping once a step is saved"
        _say(f"{signal.Signals(number).name}: {doing}; once more to stop at once")


# A forked child shares the pipe, from its first moment on: what ends the child must not look as if it were meant for the parent.


def _hold_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release_signals()


def _say(text: str) -> None:
    # Written past sys.stderr, whose lock the interrupted main thread may hold. A line of progress may stand on the terminal.
    if distributed.rank() == 0:
        os.write(2, f"{chr(10) if sys.stderr.isatty() else ''}{text}\n".encode())
