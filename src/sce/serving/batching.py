"""Work that waits is done together, by few threads, from a queue that has an end.

All state belongs to the event loop; a thread is given a batch and gives back its results. While
all compute, the next batch gathers: nobody waits for company.
"""

import asyncio
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
        """Make an empty queue, with room for so many works; at most so many are a batch.

        A result that is an exception is raised. `on_batch` is told the size of every batch.
        """
        self.compute, self.most, self.room = compute, most, room
        self.threads, self.on_batch = threads, on_batch
        self._waiting: asyncio.Queue[tuple[Work, asyncio.Future[Any]]] = asyncio.Queue()

    def __len__(self) -> int:
        return self._waiting.qsize()

    async def do(self, works: Sequence[Work]) -> list[Any]:
        """Results of works, in their order.

        Raises:
            OverloadError: At once, when they would not all find room.
        """
        if len(self) + len(works) > self.room:
            raise OverloadError
        loop = asyncio.get_running_loop()
        results = [loop.create_future() for _ in works]
        for pair in zip(works, results, strict=True):
            self._waiting.put_nowait(pair)
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
        while True:
            batch = [await self._waiting.get()]
            while len(self) and len(batch) < self.most:
                batch.append(self._waiting.get_nowait())
            batch = [(work, result) for work, result in batch if not result.done()]
            if not batch:
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
