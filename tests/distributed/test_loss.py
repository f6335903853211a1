"""The sharded loss against one process that runs the slices in turn, to the bit."""

import pytest
import torch
from torch import Tensor

from tests.distributed.made_case import Case, as_ranks, in_turn
from tests.distributed.pool import Run

PAPER = {"coverage": False, "bucket_size_x": 5}
CASES = {
    "two": Case(2),
    "three, ragged": Case(3, n_items=499),
    "four": Case(4, n_items=501),
    "paper's rule": Case(3, settings=PAPER),
    "ids by popularity": Case(4, kind="popularity", n_items=2000, dim=8),
    "ties": Case(3, kind="ties"),
    "all rows equal": Case(2, kind="equal", n_items=90),
    "more items in a bucket than in a shard": Case(4, n_items=41, size_y=24),
    "buckets of the whole catalogue": Case(3, n_items=41, size_y=41),
    "fewer items than ranks": Case(4, n_items=3, size_y=2),
    "empty batches": Case(3, empty=(0, 2)),
    "nothing anywhere": Case(2, empty=(0, 1), steps=2),
    "forced fallbacks": Case(4, candidates=1),
    "forced fallbacks among ties": Case(2, candidates=2, kind="ties", settings=PAPER),
    "one bucket": Case(3, n_buckets=1, candidates=3),
    "autocast": Case(2, autocast=True, kind="ties"),
    "bfloat16 table": Case(3, autocast=True, dtype=torch.bfloat16),
    "kernels": Case(2, n_items=60, size_y=9, settings={"backend": "triton"}, steps=2),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_give_the_bits_of_one_process(name: str, on_ranks: Run) -> None:
    case = CASES[name]
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


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
