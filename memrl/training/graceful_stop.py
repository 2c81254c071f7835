"""Stop a run on SIGINT or SIGTERM: finish the step, save, exit.

The signals reach the ranks at different times, or only some ranks, so all ranks compare once per step (`agreed`) and stop after
the same step.

torchrun forwards both signals to its workers and kills those that still run 30 seconds later; if a step takes longer, start with
`torchrun --shutdown-timeout SECONDS` (or TORCH_ELASTIC_SHUTDOWN_TIMEOUT).
"""

import os
import signal
import sys
import threading
import time
from functools import partial

from memrl.engine import distributed

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A job system signals every process, and torchrun forwards its own signal: one request may arrive twice within this time.
SAME_REQUEST_S = 2.0


class GracefulStop:
    """Handles SIGINT and SIGTERM of this process; make one, in the main thread.

    While `step` is None a signal ends the process at once, with exit code 128 + its number. Otherwise the first signal requests a
    stop after the step; a second one ends the process at once.

    Attributes:
        signal: number of the signal that the ranks agreed to stop for; 0 for none.
        step: the running step, counted from 1, after which a signal stops the run.
    """

    def __init__(self, advice: str):
        """`advice`, how to resume, is printed when the process ends at once."""
        self.signal = 0
        self.step: int | None = None
        self._advice = advice
        self._compared: int | None = None  # the last step after which the ranks compared
        self._received, self._received_at = 0, 0.0
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        # Python's own handlers run only after a collective returns, which may take as long as the slowest rank's rollouts. The
        # signal's number is written to this pipe at once, and a thread reads it.
        listener, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        # Children must not write to the pipe, so signals are blocked from before a fork until the child has let go of it.
        block, unblock = (partial(signal.pthread_sigmask, how, SIGNALS) for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK))
        os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=_forget_signals)
        threading.Thread(target=self._listen, args=(listener,), name="signals", daemon=True).start()

    def agreed(self) -> bool:
        """Whether all ranks stop after this step; collective over ranks."""
        self.signal = distributed.max_over_ranks(self._received)
        if self.signal and not self._received:
            self._request(self.signal)
        self._compared = self.step
        return self.signal != 0

    @property
    def exit_code(self) -> int:
        """0, or 128 + the signal's number: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signal if self.signal else 0

    def _listen(self, listener: int) -> None:
        while True:
            for number in filter(SIGNALS.__contains__, os.read(listener, 64)):
                if self.step is None or (self._received and time.monotonic() - self._received_at > SAME_REQUEST_S):
                    _say(f"stopped at once; {self._advice}")
                    os._exit(128 + number)  # a normal exit could wait for a collective that other ranks never join
                if not self._received:
                    self._request(number)

    def _request(self, number: int) -> None:
        self._received, self._received_at = number, time.monotonic()
        # After `agreed` the step is done: it is being saved, or the next one or the end of the run follows.
        doing = f"finishing step {self.step}, then saving" if self._compared != self.step else "stopping once a step is saved"
        _say(f"{signal.Signals(number).name}: {doing}; send it again to stop at once")


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _say(text: str) -> None:
    # Not through sys.stderr, whose lock the interrupted main thread may hold. A progress bar may be on the terminal's last line.
    if distributed.rank() == 0:
        os.write(2, f"{chr(10) if sys.stderr.isatty() else ''}{text}\n".encode())
