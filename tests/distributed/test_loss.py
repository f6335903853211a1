"""The sharded loss against one process that runs the slices in turn, to the bit."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sce import ScalableCrossEntropy
from sce.distributed import Ranks, ShardedCrossEntropy, ShardedTable
from sce.errors import InputError
from sce.losses.buckets import Centres
from tests.distributed.made_case import Case, as_ranks, in_turn, plainly
from tests.distributed.pool import Run

# Ranks share the GPU, where there is one; gloo does not mind.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAPER = {"coverage": False, "bucket_size_x": 5}
KERNELS = {"backend": "triton"}
CASES = {
    "two": Case(2),
    "three, ragged": Case(3, n_items=499),
    "four": Case(4, n_items=501),
    "paper's rule": Case(3, settings=PAPER),
    "ids by popularity": Case(4, kind="popularity", n_items=2000, dim=8),
    "ties": Case(3, kind="ties"),
    "all rows equal": Case(2, kind="equal", n_items=90),
    "rows that differ by rounding": Case(3, kind="near"),
    "more items in a bucket than in a shard": Case(4, n_items=41, size_y=24),
    "buckets of the whole catalogue": Case(3, n_items=41, size_y=41),
    "fewer items than ranks": Case(4, n_items=3, size_y=2),
    "empty batches": Case(3, empty=(0, 2)),
    "nothing anywhere": Case(2, empty=(0, 1), steps=2),
    "forced fallbacks": Case(4, candidates=1),
    "forced fallbacks among ties": Case(2, candidates=2, kind="ties", settings=PAPER),
    "one bucket": Case(3, n_buckets=1, candidates=3),
    "few rows of many dimensions": Case(4, n_items=41, dim=64, rows=1, n_buckets=1, size_y=5),
    "autocast": Case(2, autocast=True, kind="ties"),
    "bfloat16 table": Case(3, autocast=True, dtype=torch.bfloat16),
    "kernels": Case(2, n_items=40, rows=3, n_buckets=3, size_y=5, settings=KERNELS, steps=2),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_give_the_bits_of_one_process(name: str, on_ranks: Run) -> None:
    case = replace(CASES[name], device=DEVICE)
    found = on_ranks(case.slices, as_ranks, case)
    (whole,) = on_ranks(1, in_turn, case)
    for step in range(case.steps):
        for number in range(case.slices):
            if number not in case.empty:
                items = whole["items"][case.slices * step + number]
                assert torch.equal(found[number]["items"][step], items), "other buckets"
    for number, rank in enumerate(found):
        assert same(rank["loss"], whole["loss"])
        assert same(rank["body"], whole["body"])
        assert same(rank["states"], whole["states"][number :: case.slices])
        assert same(rank["table"], [table[number :: case.slices] for table in whole["table"]])
    assert ("forced" in name) <= all(rank["fallbacks"] for rank in found)


@pytest.mark.parametrize("settings", [{}, PAPER])
@pytest.mark.parametrize("autocast", [False, True])
def test_one_slice_is_the_loss_of_one_process(
    settings: dict[str, Any], autocast: bool, on_ranks: Run
) -> None:
    case = Case(1, settings=settings, autocast=autocast)
    (plain,), (turn,), (rank,) = (on_ranks(1, way, case) for way in (plainly, in_turn, as_ranks))
    for name, expected in plain.items():
        assert same(turn[name], expected)
        assert same(rank[name], expected)


def test_sizes_of_buckets_follow_from_the_same_number_of_targets(on_ranks: Run) -> None:
    case = Case(1, settings={"coverage": False, "alpha": 1.0}, max_targets=9, steps=2)
    (plain,), (rank,) = (on_ranks(1, way, case) for way in (plainly, as_ranks))
    assert same(rank["states"], plain["states"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"loss": ScalableCrossEntropy(reduction="sum")}, "is a mean; got reduction 'sum'"),
        ({"loss": None}, "loss must be ScalableCrossEntropy; got None"),
        ({"table": None}, "table must be ShardedTable; got None"),
        ({"candidates": 0}, "candidates must be at least 1; got 0"),
    ],
)
def test_no_loss_can_be_made_of_that(changed: dict[str, Any], said: str) -> None:
    given: Any = {"loss": ScalableCrossEntropy(), "table": ShardedTable(3, 2)}
    with pytest.raises(InputError, match=said):
        ShardedCrossEntropy(**given | changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rows": torch.ones(4, 2)}, "rows are what `look_up` found; got Tensor"),
        ({"states": torch.ones(4, 3)}, "differ in their last dimension"),
        ({"targets": [1, 2]}, "targets must be a tensor, got list"),
        ({"centres": torch.ones(4, 3)}, r"centres must be \[n_buckets, 2\]"),
        ({"max_targets": -1}, "max_targets must be at least 1, got -1"),
    ],
)
def test_what_has_no_loss_is_refused(changed: dict[str, Any], said: str) -> None:
    table = ShardedTable(9, 2)
    rows = table.look_up(torch.arange(4))
    given: Any = {"states": rows.values, "rows": rows, "targets": torch.arange(4)}
    with pytest.raises((ValueError, TypeError), match=said):
        ShardedCrossEntropy(ScalableCrossEntropy(), table)(**given | changed)


def looked_up(ranks: Ranks, kind: Centres, by_loss: bool) -> Any:
    """Train for a step, the last rank on padding alone; return what it comes to."""
    table = ShardedTable(300, 8, ranks)
    loss = ShardedCrossEntropy(ScalableCrossEntropy(centres=kind, bucket_size_y=9), table)
    generator = torch.Generator().manual_seed(ranks.rank)
    items, targets = torch.arange(50), torch.arange(50, 100)
    targets[:: 1 if ranks.rank == 2 else 7] = -100
    rows = loss.look_up(items, targets) if by_loss else table.look_up(items)
    value = loss(rows.values + 0, rows, targets, generator=generator)
    value.backward()
    table.send_gradients()
    assert table.shard.grad is not None
    return value.item(), table.shard.grad.to_dense()


@pytest.mark.parametrize("kind", ["random", "states", "mix"])
def test_who_was_told_of_the_batch_comes_to_the_same(kind: Centres, on_ranks: Run) -> None:
    told, asked = (on_ranks(3, looked_up, kind, by_loss) for by_loss in (True, False))
    for (value, gradient), (expected, whole) in zip(told, asked, strict=True):
        assert value == expected
        assert torch.equal(gradient, whole)


def test_rows_of_another_batch_are_refused() -> None:
    loss = ShardedCrossEntropy(ScalableCrossEntropy(bucket_size_y=9), ShardedTable(300, 8))
    rows = loss.look_up(torch.arange(9), torch.arange(9))
    given: Any = rows.values, rows, torch.arange(9)
    with pytest.raises(InputError, match="looked up for 6 centres, and there are 14"):
        loss(*given, max_targets=50)
    with pytest.raises(InputError, match="item -7 is not in the catalogue"):
        loss(*given[:2], torch.tensor([-7, *range(8)]))


def drawn(ranks: Ranks, kind: Centres, seed: int) -> Any:
    """Return the loss with centres that each rank draws; NaN in a state if the seed is 9."""
    table = ShardedTable(300, 8, ranks)
    loss = ShardedCrossEntropy(ScalableCrossEntropy(centres=kind, bucket_size_y=9), table)
    generator = torch.Generator().manual_seed(10 * seed + ranks.rank)
    rows = table.look_up(torch.arange(50))
    states = rows.values + (torch.nan if seed == 9 and ranks.rank == 1 else 0)
    return loss(states, rows, torch.arange(50, 100), generator=generator).item()


@pytest.mark.parametrize("kind", ["random", "states", "mix"])
def test_centres_are_drawn_by_each_rank(kind: Centres, on_ranks: Run) -> None:
    one, again, other = (on_ranks(2, drawn, kind, seed) for seed in (1, 1, 2))
    assert one == again
    assert one[0] == one[1]
    assert one != other
    assert all(map(math.isnan, on_ranks(2, drawn, kind, 9)))


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
