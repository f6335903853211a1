import asyncio
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

import pytest

from sce.serving.batching import Batcher, OverloadError


def run(batcher: Batcher[int], use: Coroutine[Any, Any, Any]) -> Any:
    async def both() -> Any:
        worker = asyncio.create_task(batcher.run())
        try:
            return await use
        finally:
            worker.cancel()
            with suppress(asyncio.CancelledError):
                await worker

    return asyncio.run(both())


class Slow:
    """Computes squares, the first batch only when told to go on; below zero it fails."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, works: Sequence[int]) -> list[Any]:
        self.batches.append([*works])
        self.begun.set()
        self.go_on.wait(30)
        if -2 in works:
            raise RuntimeError("all of them")
        return [ValueError("negative") if work < 0 else work**2 for work in works]

    async def is_busy(self) -> None:
        await asyncio.to_thread(self.begun.wait, 30)


def test_what_waits_is_computed_together_up_to_a_number() -> None:
    slow, sizes = Slow(), list[int]()

    async def use() -> Any:
        tasks = [asyncio.create_task(batcher.do([0]))]
        await slow.is_busy()
        tasks += [asyncio.create_task(batcher.do(works)) for works in ([1, 2], [3], [-1], [4])]
        await asyncio.sleep(0)
        assert len(batcher) == 5
        slow.go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    batcher = Batcher(slow, most=3, room=5, on_batch=sizes.append)
    first, pair, single, negative, last = run(batcher, use())
    assert [first, pair, single, last] == [[0], [1, 4], [9], [16]]
    assert str(negative) == "negative"
    assert slow.batches == [[0], [1, 2, 3], [-1, 4]]
    assert sizes == [1, 3, 2]


def test_beyond_its_room_work_is_refused_at_once_and_whole() -> None:
    slow = Slow()

    async def use() -> Any:
        tasks = [asyncio.create_task(batcher.do([0]))]
        await slow.is_busy()
        tasks.append(asyncio.create_task(batcher.do([1, 2])))
        await asyncio.sleep(0)
        for works in ([3], [3, 4]):
            with pytest.raises(OverloadError):
                await batcher.do(works)
        slow.go_on.set()
        return await asyncio.gather(*tasks)

    batcher = Batcher(slow, most=8, room=2)
    assert run(batcher, use()) == [[0], [1, 4]]


def test_what_was_given_up_is_not_computed_and_a_failure_is_told_to_all() -> None:
    slow = Slow()

    async def use() -> None:
        first = asyncio.create_task(batcher.do([0]))
        await slow.is_busy()
        given_up, failing = (asyncio.create_task(batcher.do([n])) for n in (7, -2))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0)
        slow.go_on.set()
        assert await first == [0]
        with pytest.raises(RuntimeError, match="all of them"):
            await failing
        assert await batcher.do([5]) == [25]

    batcher = Batcher(slow, most=8, room=8)
    run(batcher, use())
    assert slow.batches == [[0], [-2], [5]]


def test_several_threads_compute_at_the_same_time() -> None:
    together = threading.Barrier(2)

    def compute(works: Sequence[int]) -> list[int]:
        together.wait(30)
        return [work + 1 for work in works]

    async def use() -> Any:
        return await batcher.do([1, 2, 3, 4])

    batcher = Batcher(compute, most=2, room=4, threads=2)
    assert run(batcher, use()) == [2, 3, 4, 5]


def test_of_a_list_that_was_given_up_nothing_is_computed() -> None:
    slow = Slow()

    async def use() -> None:
        first = asyncio.create_task(batcher.do([0]))
        await slow.is_busy()
        given_up = asyncio.create_task(batcher.do([7, 8]))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0)
        slow.go_on.set()
        assert [await first, await batcher.do([5])] == [[0], [25]]

    batcher = Batcher(slow, most=8, room=8)
    run(batcher, use())
    assert slow.batches == [[0], [5]]
