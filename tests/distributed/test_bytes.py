"""Bytes that a rank sends in a step, against the formulas of the design."""

from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor

from sce import ScalableCrossEntropy
from sce.distributed import Ranks, ShardedCrossEntropy, ShardedTable
from sce.distributed.nearest import n_candidates

N_ITEMS, DIM, STATES, N_BUCKETS, SIZE_Y = 60_000, 32, 256, 6, 64


class ThreadRanks(Ranks):
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, slots: list[tuple[Tensor, ...]], barrier: Barrier) -> None:
        super().__init__()
        self.rank, self.size, self.slots, self.barrier = rank, len(slots), slots, barrier

    def _all_to_all(
        self, received: Tensor, rows: Tensor, receive: list[int], send: list[int]
    ) -> None:
        self.slots[self.rank] = rows.split(send)
        self.barrier.wait()
        received.copy_(torch.cat([parts[self.rank] for parts in self.slots]))
        self.barrier.wait()


def take_step(ranks: Ranks) -> None:
    table = ShardedTable(N_ITEMS, DIM, ranks)
    ranks.bytes_sent = 0  # new rows have been
    loss = ShardedCrossEntropy(
        ScalableCrossEntropy(n_buckets=N_BUCKETS, bucket_size_y=SIZE_Y), table
    )
    generator = torch.Generator().manual_seed(ranks.rank)
    items = torch.randperm(N_ITEMS, generator=generator)[:STATES]
    targets = items.roll(1)
    rows = loss.look_up(items, targets)
    loss(rows.values[rows.places(items)], rows, targets, generator=generator).backward()
    table.send_gradients()


@pytest.mark.parametrize("size", [8, 64])
def test_bytes_sent_are_those_of_the_design(size: int) -> None:
    slots: list[tuple[Tensor, ...]] = [()] * size
    barrier = Barrier(size, timeout=60)  # seconds
    every = [ThreadRanks(rank, slots, barrier) for rank in range(size)]
    threads = [Thread(target=take_step, args=(ranks,)) for ranks in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    others, places = (size - 1) / size, N_BUCKETS * SIZE_Y
    row = 4 * DIM
    expected = (
        others * STATES * (row + 4)  # lookup
        + (size - 1) * N_BUCKETS * row  # centres
        + (size - 1) * N_BUCKETS * 8 * (n_candidates(SIZE_Y, size) + 1)  # candidates
        + others * places * (row + 4)  # rows of buckets
        + others * (places + STATES) * row  # gradients
    )
    sent = sum(ranks.bytes_sent for ranks in every) / size
    print(f"{size} ranks: {sent:,.0f} bytes a rank, by the formulas {expected:,.0f}")
    assert sent == pytest.approx(expected, rel=0.05)
