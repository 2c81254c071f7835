"""Run coroutines with bounded concurrency."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Crew(Generic[T]):
    """Tasks of an iterable's coroutines, at most `limit` at a time.

    Attributes:
        live: running tasks, and finished ones until the next `settle`.
    """

    def __init__(self, agents: Iterable[Coroutine[Any, Any, T]], limit: int):
        """
        Args:
            agents: taken one by one when there is room, so a generator may create them late.
            limit: most tasks at a time.
        """
        self._agents, self._source, self._limit = agents, iter(agents), limit
        self._tasks: list[asyncio.Task[T]] = []
        self._is_complete = False
        self.live: set[asyncio.Task[T]] = set()

    def fill(self) -> bool:
        """Start tasks while there is room; False if all have finished."""
        while not self._is_complete and len(self.live) < self._limit:
            agent = next(self._source, None)
            if agent is None:
                self._is_complete = True
            else:
                self._tasks.append(asyncio.ensure_future(agent))
                self.live.add(self._tasks[-1])
        return bool(self.live)

    def settle(self) -> None:
        """Drop finished tasks; re-raise their errors."""
        ended = {task for task in self.live if task.done()}
        self.live -= ended
        for task in ended:
            task.result()

    def results(self) -> list[T]:
        """In the agents' order."""
        return [task.result() for task in self._tasks]

    async def dismiss(self) -> None:
        """Cancel running tasks and close coroutines that were not started."""
        for task in self.live:
            task.cancel()
        # Retrieves the errors of all tasks; asyncio would print those that nothing retrieved.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if isinstance(self._agents, Sequence):  # a generator has not created the others yet
            for agent in self._source:
                agent.close()
