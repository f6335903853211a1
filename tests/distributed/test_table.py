from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sce.distributed import Ranks, Rows, ShardedTable
from sce.errors import InputError
from tests.distributed.pool import Run


def shard(ranks: Ranks, n_items: int) -> Tensor:
    return ShardedTable(n_items, 4, ranks, seed=5).shard.detach()


@pytest.mark.parametrize("n_items", [3, 65_536, 140_001])
def test_new_rows_follow_from_the_seed_and_their_ids(n_items: int, on_ranks: Run) -> None:
    block = (n_items - 1) // 65_536
    seed = int(np.random.SeedSequence([5, block]).generate_state(1, np.uint64)[0]) >> 1
    bound = (6 / (n_items + 4)) ** 0.5
    rows = torch.empty(n_items - 65_536 * block, 4)
    rows.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
    (whole,) = on_ranks(1, shard, n_items)
    assert torch.equal(whole[65_536 * block :], rows)
    for size in (2, 3, 4):
        shards = on_ranks(size, shard, n_items)
        assert all(torch.equal(part, whole[rank::size]) for rank, part in enumerate(shards))


def gradients(ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Look up twice, and send home 10^rank of the first rows, twice that of the second."""
    table = ShardedTable(10, 2, ranks)
    histories = torch.tensor([[7, -1], [0, 7]], dtype=torch.int32)
    first, second = table.look_up(histories), table.look_up(torch.tensor([7]))
    assert first.places(histories).tolist() == [[1, -1], [0, 1]]
    with torch.no_grad():
        unseen = table.look_up(torch.arange(10))
    loss = 10**ranks.rank * (first.values.sum() + 2 * second.values.sum())
    loss.backward()
    table.send_gradients()
    assert table.shard.grad is not None
    assert table.shard.grad.is_coalesced()
    table.send_gradients()  # all were sent
    return unseen.values, first.values.detach(), table.shard.grad.to_dense()


def test_rows_come_and_gradients_go_home(on_ranks: Run) -> None:
    (whole,) = on_ranks(1, shard_of_ten)
    for size in (1, 3, 4):
        every = sum(10**rank for rank in range(size))
        expected = torch.zeros(10, 2)
        expected[0], expected[7] = every, 3 * every
        for rank, (rows, first, gradient) in enumerate(on_ranks(size, gradients)):
            assert torch.equal(rows, whole)
            assert torch.equal(first, whole[[0, 7]])
            assert torch.equal(gradient, expected[rank::size])


def expecting(ranks: Ranks, by: int) -> tuple[Rows, int]:
    """Look up what that many ranks expect; return also how many exchanges that took."""
    table, later = ShardedTable(50, 2, ranks), torch.arange(ranks.rank, 50, 3)
    if ranks.rank < by:
        table.expect(later, note=ranks.rank)
    for _ in range(2):  # something else
        assert table.want(torch.arange(5), note=ranks.rank).notes == list(range(ranks.size))
    before = ranks.exchanges
    rows = table.look_up(later)
    taken = ranks.exchanges - before
    assert torch.equal(table.look_up(later).values, rows.values)  # once more
    return rows, taken


def test_what_all_ranks_expect_takes_no_exchange_of_sizes(on_ranks: Run) -> None:
    (whole,) = (each.values for each, _ in on_ranks(1, every_row))
    for by, exchanges in ((0, 3), (2, 3), (3, 2)):
        for rank, (rows, taken) in enumerate(on_ranks(3, expecting, by)):
            assert torch.equal(rows.ids, torch.arange(rank, 50, 3))
            assert torch.equal(rows.values, whole[rows.ids])
            assert taken == exchanges


def every_row(ranks: Ranks) -> tuple[Rows, int]:
    return ShardedTable(50, 2, ranks).look_up(torch.arange(50)), 0


def shard_of_ten(ranks: Ranks) -> Tensor:
    return ShardedTable(10, 2, ranks).shard.detach()


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, 2], r"ids must be Tensor; got \[1, 2\]"),
        (
            torch.ones(2),
            "ids of items must be int64 or int32, on cpu as the table is; got torch.float32",
        ),
        (torch.ones(2, dtype=torch.bool), "got torch.bool on cpu"),
        (torch.empty(2, dtype=torch.int64, device="meta"), "got torch.int64 on meta"),
    ],
)
def test_what_is_no_id_is_refused(ids: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        ShardedTable(10, 2).look_up(ids)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_items": "4"}, "n_items must be a whole number"),
        ({"dim": 0}, "dim is at least 1, and seed not negative; got 0 and 0"),
        ({"seed": -1}, "dim is at least 1, and seed not negative; got 2 and -1"),
        ({"dtype": torch.int64}, "dtype must be floating point; got torch.int64"),
        ({"rows": torch.ones(3, 2)}, r"rows must be \[4, 2\]; got \[3, 2\]"),
        ({"ranks": 3}, "ranks must be Ranks or None; got 3"),
    ],
)
def test_no_table_can_be_made_of_that(options: dict[str, Any], said: str) -> None:
    given: Any = {"n_items": 4, "dim": 2}
    with pytest.raises(InputError, match=said):
        ShardedTable(**given | options)


def test_ids_outside_and_tables_too_large_are_refused() -> None:
    table = ShardedTable(10, 2)
    with pytest.raises(InputError, match="item 10 is not in the catalogue of 10 items"):
        table.look_up(torch.tensor([3, 10]))
    for n_items in (0, 2**31):
        with pytest.raises(InputError, match=r"from 1 to 2,147,483,647 items; got"):
            ShardedTable(n_items, 1)
