from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sce.data.prepared import PreparedDataset
from sce.distributed import Ranks, ShardedRanker, ShardedTable, sharded_top_k
from sce.errors import InputError
from sce.evaluation.evaluate import Metrics, evaluate
from sce.evaluation.ranking import Ranking, top_k
from sce.models.sasrec import SASRec
from tests.cycle_data import MODEL, make_cycle
from tests.distributed.made_case import Case
from tests.distributed.pool import Run


def ranked(
    ranks: Ranks, table: Tensor, states: Tensor, k: int, seen: tuple[Tensor, Tensor] | None
) -> Ranking:
    whole = ShardedTable(len(table), table.shape[1], ranks)
    whole.shard.data = table[ranks.rank :: ranks.size]
    if seen is not None:
        here = seen[1] % ranks.size == ranks.rank
        seen = seen[0][here], seen[1][here] // ranks.size
    return sharded_top_k(states[ranks.rank :: ranks.size], whole, k, seen=seen)


@pytest.mark.parametrize("kind", ["random", "ties", "equal"])
@pytest.mark.parametrize("with_seen", [False, True])
def test_ranking_is_that_of_one_process(kind: str, with_seen: bool, on_ranks: Run) -> None:
    table, states = Case(1, kind=kind, n_items=101, dim=8).table(), torch.randn(7, 8)
    rows = torch.arange(7).repeat_interleave(60)
    seen = (torch.randint(101, (420,)), rows) if with_seen else None
    for k in (1, 10, 101, 120):
        expected = top_k(states, table, k, seen=seen)
        for size in (1, 2, 3, 4):
            for rank, found in enumerate(on_ranks(size, ranked, table, states, k, seen)):
                assert torch.equal(found.items, expected.items[rank::size])
                assert torch.equal(found.scores, expected.scores[rank::size])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"k": 0}, "k must be at least 1; got 0"),
        ({"k": 1.5}, "k must be a whole number of 64 bits; got 1.5"),
        ({"states": [[0.5]]}, r"states must be Tensor; got \[\[0.5\]\]"),
        ({"states": torch.ones(4)}, r"states must be \[b, 4\], floating point, .* got \[4\]"),
        ({"states": torch.ones(2, 3)}, r"states must be \[b, 4\], .* got \[2, 3\]"),
        ({"states": torch.ones(2, 4).int()}, r"floating point, on cpu; got \[2, 4\], int32"),
        ({"seen": (torch.ones(1).int(), torch.ones(2).int())}, "seen are flat item ids, and the"),
    ],
)
def test_what_cannot_be_ranked_is_refused(changed: dict[str, Any], said: str) -> None:
    given: Any = {"states": torch.randn(2, 4), "table": ShardedTable(5, 4), "k": 3}
    with pytest.raises(InputError, match=said):
        sharded_top_k(**given | changed)


def measured(ranks: Ranks, data: Path, model: SASRec) -> tuple[Metrics, list[int]]:
    rows = model.catalogue
    table = ShardedTable(len(rows), rows.shape[1], ranks, rows=rows)
    told: list[int] = []
    ranker = ShardedRanker(model, table)
    found = ranker.evaluate(PreparedDataset.load(data), batch_size=5, progress=told.append)
    return found, told


def test_metrics_are_those_of_one_process(on_ranks: Run, tmp_path: Path) -> None:
    dataset = make_cycle(tmp_path / "data", items=70)
    model = SASRec(70, MODEL, seed=1)
    expected = evaluate(model, dataset, batch_size=7)
    for size in (1, 2, 3, 4):
        for found, told in on_ranks(size, measured, dataset.path, model):
            assert found == expected
            assert found.ranks.tolist() == expected.ranks.tolist()
            assert told[-1] == len(dataset.test)
