"""Wait for a call no longer than a deadline."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, function: Callable[[], T]) -> T:
    """The result of `function`, run in a thread of its own.

    For calls into libraries that release Python's lock but check neither signals nor deadlines. The thread cannot be stopped:
    after the deadline it goes on until the process ends, which it does not delay.

    Raises:
        TimeoutError: it takes longer than `seconds`.
        Exception: what `function` raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"it takes more than {seconds:g} s")
    return results[0]
