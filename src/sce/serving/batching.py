"""Work that waits is done together, by few threads, from a queue that has an end.

All state belongs to the event loop; a thread is given a batch and gives back its results. While
all compute, the next batch gathers: nobody waits for company.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Work = TypeVar("Work")


class OverloadError(Exception):
    """The queue has no room."""


class Batcher(Generic[Work]):
    """A queue of work, and the threads that do it."""

    def __init__(
        self,
        compute: Callable[[Sequence[Work]], Sequence[Any]],
        *,
        most: int,
        room: int,
        threads: int = 1,
        on_batch: Callable[[int], object] = lambda size: None,
    ) -> None:
        """Make an empty queue.

        Args:
            compute: From works to their results; a result that is an exception is raised.
            most: Works computed at once.
            room: Works that may wait.
            threads: Batches computed at the same time.
            on_batch: Told the size of every batch.
        """
        self.compute, self.most, self.room = compute, most, room
        self.threads, self.on_batch = threads, on_batch
        self._waiting: deque[tuple[Work, asyncio.Future[Any]]] = deque()
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    async def do(self, works: Sequence[Work]) -> list[Any]:
        """Results of works, in their order.

        Raises:
            OverloadError: At once, when they would not all find room.
        """
        if len(self) + len(works) > self.room:
            raise OverloadError
        loop = asyncio.get_running_loop()
        results = [loop.create_future() for _ in works]
        self._waiting.extend(zip(works, results, strict=True))
        self._wake.set()
        try:
            return [await result for result in results]
        finally:  # of one that was given up, the others are not computed either
            for result in results:
                result.cancel()

    async def run(self) -> None:
        """Do the work, until cancelled."""
        with ThreadPoolExecutor(self.threads, "compute") as pool:
            await asyncio.gather(*(self._run_in(pool) for _ in range(self.threads)))

    async def _run_in(self, pool: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while await self._wake.wait():
            batch: list[tuple[Work, asyncio.Future[Any]]] = []
            while self._waiting and len(batch) < self.most:
                if not self._waiting[0][1].done():
                    batch.append(self._waiting[0])
                self._waiting.popleft()
            if not batch:
                self._wake.clear()
                continue
            self.on_batch(len(batch))
            works = [work for work, _ in batch]
            try:
                found = await loop.run_in_executor(pool, self.compute, works)
            except Exception as error:
                found = [error] * len(batch)
            for (_, result), value in zip(batch, found, strict=True):
                if result.done():
                    continue
                if isinstance(value, Exception):
                    result.set_exception(value)
                else:
                    result.set_result(value)
