import pytest
import torch
from torch import Tensor

from sce.distributed import Ranks, ShardedTable
from sce.distributed.nearest import NearestItems, n_candidates
from tests.distributed.made_case import Case, best_items
from tests.distributed.pool import Run


def test_candidates_are_those_of_the_design() -> None:
    given = [(256, 2), (1024, 8), (4096, 8), (256, 64), (1024, 64), (4096, 64)]
    assert [n_candidates(*each) for each in given] == [193, 212, 670, 27, 53, 129]
    assert n_candidates(4, 1) == n_candidates(4, 64) == 4


def items_of(nearest: NearestItems, centres: Tensor, k: int) -> Tensor:
    """The k items nearest to each centre of this rank, as the loss finds them."""
    ranks = nearest.table.ranks
    counts = [n for (n,) in ranks.gather_counts(len(centres))]
    keys, failed = nearest.guess(centres, counts, k, None)
    counts = ranks.gather(failed.sum().unsqueeze(0), [1] * ranks.size).tolist()
    return nearest.settle(centres, keys, failed, counts, None)


def found(ranks: Ranks, table: Tensor, centres: Tensor, k: int, most: int | None) -> list[Tensor]:
    whole = ShardedTable(len(table), table.shape[1], ranks)
    whole.shard.data = table[ranks.rank :: ranks.size]
    nearest = NearestItems(whole, candidates=most)
    own = centres[ranks.rank :: ranks.size]  # ranks have different numbers of them
    sent = ranks.bytes_sent
    items = items_of(nearest, own, k)
    sent -= ranks.bytes_sent
    for _ in range(2):
        assert torch.equal(items_of(nearest, own, k), items)
    after = ranks.bytes_sent
    items_of(nearest, own, k)
    return [items, torch.tensor(nearest.fallbacks), torch.tensor([-sent, ranks.bytes_sent - after])]


@pytest.mark.parametrize("most", [None, 1, 5])
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "near", "popularity"])
def test_items_are_the_best_of_all(kind: str, most: int | None, on_ranks: Run) -> None:
    table = Case(1, kind=kind, n_items=700, dim=8).table()
    centres = torch.randn(11, 8)
    for k in (1, 40, 700):
        expected = best_items(centres, table, k, None)
        for size in (1, 2, 4):
            for rank, (items, *_) in enumerate(on_ranks(size, found, table, centres, k, most)):
                assert torch.equal(items, expected[rank::size])


def test_a_shard_that_has_all_the_best_is_asked_again_and_then_for_more(on_ranks: Run) -> None:
    table = torch.randn(4000, 8)
    table[::2] *= 100  # ids that know of embeddings
    centres = torch.randn(12, 8)
    for rank, (items, fallbacks, sent) in enumerate(on_ranks(2, found, table, centres, 200, None)):
        assert torch.equal(items, best_items(centres, table, 200, None)[rank::2])
        assert fallbacks == 2  # then twice as many candidates are enough
        assert sent[1] < sent[0]


def test_kernels_are_given_some_centres_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sce.distributed.nearest._CENTRES_AT_ONCE", 2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table, centres = ShardedTable(50, 8, Ranks(device=device)), torch.randn(5, 8, device=device)
    items = items_of(NearestItems(table, "triton"), centres, 6)
    assert torch.equal(items, best_items(centres, table.shard.detach(), 6, None))
