"""Coroutines at work, so many at a time: what every llm drives its agents with."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Crew(Generic[T]):
    """
    Attributes:
        live: the tasks that are not known to have ended.
    """

    def __init__(self, agents: Iterable[Coroutine[Any, Any, T]], limit: int):
        """
        Args:
            agents: asked for one by one as there is room, so they may be made lazily.
            limit: agents at work at a time.
        """
        self._agents, self._source, self._limit = agents, iter(agents), limit
        self._tasks: list[asyncio.Task[T]] = []
        self._is_complete = False
        self.live: set[asyncio.Task[T]] = set()

    def fill(self) -> bool:
        """Start agents while there is room; False once all have ended."""
        while not self._is_complete and len(self.live) < self._limit:
            agent = next(self._source, None)
            if agent is None:
                self._is_complete = True
            else:
                self._tasks.append(asyncio.ensure_future(agent))
                self.live.add(self._tasks[-1])
        return bool(self.live)

    def settle(self) -> None:
        """Take leave of those that have ended; what an agent raised is raised now, not after hours of the others' work."""
        ended = {task for task in self.live if task.done()}
        self.live -= ended
        for task in ended:
            task.result()

    def results(self) -> list[T]:
        """In the agents' order."""
        return [task.result() for task in self._tasks]

    async def dismiss(self) -> None:
        """Cancel those at work, and close those that never began."""
        for task in self.live:
            task.cancel()
        # One error is raised elsewhere; the others' must be looked at too, or asyncio prints each of them.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if isinstance(self._agents, Sequence):  # a generator has not made them
            for agent in self._source:
                agent.close()
