"""Documents, each made once for all that read it, and where that is slow in a thread of their own.

Making a document of a million tokens takes seconds, in which the sampler would stand still if the readers made their own. The
thread does not make anything faster: it lets the others' steps go on in between. There is one of it, so generators need not be
safe for several, and what it runs must not share a tokenizer with the sampler's thread. A document is a function of its task,
length, number and seed, so no result depends on any of this. When a document is ready does decide what shares a batch, though, so
tasks that are quick make theirs at once, and are read in the same batches every time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from memrl.types import Sample

if TYPE_CHECKING:
    from memrl.evaluation.tasks import Length, Task

Place = tuple[str, "Length", int]  # task, length, index


class Documents:
    """What is to be read, by task, length and index; a context manager.

    A document is made when the first reading asks for it, and forgotten here when the last one has got it.
    """

    def __init__(self, tasks: Mapping[str, Task], seed: int, readings: Iterable[Place]):
        """
        Args:
            readings: the document of every reading that will ask, as often as it will.
        """
        self._tasks, self._seed = tasks, seed
        self._left = Counter(readings)
        self._made: dict[Place, asyncio.Future[Sample]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="documents")

    def __enter__(self) -> Documents:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def get(self, place: Place) -> Sample:
        """The document; what its generator raises, each of its readers gets."""
        if place not in self._made:
            self._made[place] = self._begin(*place)
        made = self._made[place]
        self._left[place] -= 1
        if not self._left[place]:
            del self._made[place], self._left[place]
        return await made

    def _begin(self, name: str, length: Length, index: int) -> asyncio.Future[Sample]:
        task, loop = self._tasks[name], asyncio.get_running_loop()
        if task.is_slow:
            return loop.run_in_executor(self._thread, task.sample, length, index, self._seed)
        made = loop.create_future()
        try:
            made.set_result(task.sample(length, index, self._seed))
        except Exception as problem:
            made.set_exception(problem)
        return made
