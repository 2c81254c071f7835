"""Run coroutines with bounded concurrency."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class TaskPool(Generic[T]):
    """Runs coroutines, at most `limit` at a time; they are consumed as tasks finish, so a generator can create them lazily.

    Attributes:
        running: tasks that have been started and not yet collected.
    """

    def __init__(self, coroutines: Iterable[Coroutine[Any, Any, T]], limit: int):
        self._coroutines, self._source, self._limit = coroutines, iter(coroutines), limit
        self._tasks: list[asyncio.Task[T]] = []
        self.running: set[asyncio.Task[T]] = set()

    def start(self) -> bool:
        """Start coroutines up to the limit; returns False once all have finished."""
        for coroutine in islice(self._source, self._limit - len(self.running)):
            self._tasks.append(asyncio.ensure_future(coroutine))
            self.running.add(self._tasks[-1])
        return bool(self.running)

    def collect(self) -> None:
        """Drop finished tasks; re-raise their errors at once, not after hours of the other tasks' work."""
        finished = {task for task in self.running if task.done()}
        self.running -= finished
        for task in finished:
            task.result()

    def results(self) -> list[T]:
        """The results, in the coroutines' order."""
        return [task.result() for task in self._tasks]

    async def cancel(self) -> None:
        """Cancel running tasks, and close coroutines that were not started."""
        for task in self.running:
            task.cancel()
        # Retrieve every task's error, or asyncio logs each one that was not raised elsewhere.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if isinstance(self._coroutines, Sequence):  # a generator has not created the others
            for coroutine in self._source:
                coroutine.close()
