"""Run coroutines with bounded concurrency, and tell the tasks that one of them creates apart."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
_paths: WeakKeyDictionary[asyncio.Future, tuple[int, ...]] = WeakKeyDictionary()
_num_children: WeakKeyDictionary[asyncio.Future, int] = WeakKeyDictionary()


def task_path() -> tuple[int, ...]:
    """Where the running task stands below the pool's task that it belongs to: () is that task itself, (2, 0) the first task that
    its third task created (`asyncio.gather` creates one for each coroutine).

    It depends on the order of creation alone, not on which task ends first.
    """
    task = asyncio.current_task()
    return _paths.get(task, ()) if task is not None else ()


def _create_task(loop: asyncio.AbstractEventLoop, coroutine, **options) -> asyncio.Task:
    task = asyncio.Task(coroutine, loop=loop, **options)
    parent = asyncio.current_task(loop)
    if parent is not None:
        number = _num_children.get(parent, 0)
        _num_children[parent] = number + 1
        _paths[task] = (*_paths.get(parent, ()), number)
    return task


class TaskPool(Generic[T]):
    """Runs coroutines, at most `limit` at a time; they are consumed as tasks finish, so a generator can create them lazily.

    Made inside an event loop; see `task_path` for the tasks that the coroutines create.

    Attributes:
        running: tasks that have been started and not yet collected.
    """

    def __init__(self, coroutines: Iterable[Coroutine[Any, Any, T]], limit: int):
        self._coroutines, self._source, self._limit = coroutines, iter(coroutines), limit
        self._tasks: list[asyncio.Task[T]] = []
        self.running: set[asyncio.Task[T]] = set()
        asyncio.get_running_loop().set_task_factory(_create_task)

    def start(self) -> bool:
        """Start coroutines up to the limit; returns False once all have finished."""
        for coroutine in islice(self._source, self._limit - len(self.running)):
            self._tasks.append(asyncio.ensure_future(coroutine))
            _paths[self._tasks[-1]] = ()
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
