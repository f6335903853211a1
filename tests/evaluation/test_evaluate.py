import gc
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from sce.data.prepared import Sequences
from sce.errors import InputError
from sce.evaluation.evaluate import Metrics, evaluate
from sce.evaluation.ranking import Popularity
from sce.models.sasrec import SASRec, SASRecSettings
from tests.cycle_data import lay_out


@dataclass(frozen=True)
class Tiny:
    test: Sequences
    n_items: int


def dataset_of(sequences: list[list[int]], n_items: int) -> Tiny:
    return Tiny(lay_out(sequences, range(len(sequences))), n_items)


class LastItem:
    """Scores every item by its nearness to the last item of the history."""

    max_length = 3

    def __init__(self, n_items: int) -> None:
        positions = torch.arange(n_items, dtype=torch.float32)
        # -(x - y)^2 as a product: -x^2 * 1 + 2xy - y^2 * 1
        self.catalogue = torch.stack([-positions.square(), positions], dim=1)

    def __call__(self, histories: Tensor) -> Tensor:
        assert histories.shape[1] <= self.max_length
        return torch.stack([torch.ones(histories.shape), 2.0 * histories], dim=2)


class Prefixed(LastItem):
    """Gives a state before the first event too, so that those after it stand one place later."""

    def __call__(self, histories: Tensor) -> Tensor:
        states = super().__call__(histories)
        return torch.cat([states[:, :1], states], dim=1)


def test_states_that_are_not_those_of_the_events_are_refused() -> None:
    dataset = dataset_of([[9, 0, 1, 2], [4, 5, 9, 3]], n_items=10)
    message = r"a model maps histories \[\d+, 3\] to states .*; got \[\d+, 4, 2\]"
    with pytest.raises(InputError, match=message):
        evaluate(Prefixed(10), dataset)


class Computed(nn.Module):
    """Computes its catalogue, of which training drops most rows."""

    max_length = 3

    @property
    def catalogue(self) -> Tensor:
        return nn.functional.dropout(LastItem(10).catalogue, 0.9, self.training)

    def forward(self, histories: Tensor) -> Tensor:
        return LastItem(10)(histories)


def test_a_catalogue_that_is_computed_is_that_of_evaluation() -> None:
    dataset = dataset_of([[9, 0, 1, 2], [4, 5, 9, 3], [7, 7, 6, 7]], n_items=10)
    model, expected = Computed(), evaluate(LastItem(10), dataset)
    assert evaluate(model, dataset).ranks.tolist() == expected.ranks.tolist()
    assert model.training


def test_metrics_by_hand() -> None:
    # Test: after 1, seen 9 0 1, the nearest left is 2, the target: rank 0. After 9, seen 4 5 9:
    # 8 7 6 3, rank 3. After 6, seen 7 and 6: the target itself was seen.
    dataset = dataset_of([[9, 0, 1, 2], [4, 5, 9, 3], [7, 7, 6, 7]], n_items=10)
    found = evaluate(LastItem(10), dataset, split="test", ks=(1, 4))
    assert found.users == 3
    assert found.seen_targets == 1
    assert found.ranks.tolist() == [1, 4, 0]
    assert found["hr@1"] == pytest.approx(1 / 3)
    assert found["hr@4"] == pytest.approx(2 / 3)
    assert found["ndcg@4"] == pytest.approx((1 + 1 / math.log2(5)) / 3)
    assert found["mrr@4"] == pytest.approx((1 + 1 / 4) / 3)
    # First choices: 2, 8, 5; first four: 2 3 4 5, 8 7 6 3, 5 4 8 3.
    assert found["cov@1"] == 0.3
    assert found["cov@4"] == 0.7
    assert list(found.values)[4:] == ["ndcg@4", "hr@4", "mrr@4", "cov@4"]

    kept = evaluate(LastItem(10), dataset, split="test", ks=(2,), keep_seen=True)
    # 1 0 (not 2), 9 8, 6 5: seen items take the first places, and 7 comes third after 6.
    assert kept["hr@2"] == 0
    assert kept.seen_targets == 1

    validation = evaluate(LastItem(10), dataset, split="validation", ks=(7,))
    # User 0: after 0, seen 9 0: 1 at rank 0. User 1: after 5: 6 3 7 2 8 1 9, rank 6. User 2: after
    # 7, seen 7: 6 at rank 0.
    assert validation["mrr@7"] == pytest.approx((1 + 1 / 7 + 1) / 3)
    assert validation.seen_targets == 0


@dataclass(frozen=True)
class Logged(Tiny):
    popular_items: NDArray[np.bool_]


def test_popular_and_rare_targets_apart_by_hand() -> None:
    # As above: the targets 2, 3 and 7 stand at ranks 1 and 4 and, seen before, nowhere.
    test = dataset_of([[9, 0, 1, 2], [4, 5, 9, 3], [7, 7, 6, 7]], n_items=10).test
    dataset = Logged(test, 10, np.isin(np.arange(10), [3, 7]))
    found = evaluate(LastItem(10), dataset, split="test", ks=(1, 4))
    first = {"users": 1, "ndcg@1": 1, "hr@1": 1, "mrr@1": 1, "ndcg@4": 1, "hr@4": 1, "mrr@4": 1}
    assert found.by_popularity["rare"] == first
    assert found.by_popularity["popular"] == pytest.approx(
        {"users": 2, "ndcg@1": 0, "hr@1": 0, "mrr@1": 0,
         "ndcg@4": 1 / math.log2(5) / 2, "hr@4": 1 / 2, "mrr@4": 1 / 8}
    )  # fmt: skip
    # Validation targets are 1, 9 and 6: none is popular.
    apart = evaluate(LastItem(10), dataset, split="validation", ks=(7,)).by_popularity
    assert apart["popular"] == {"users": 0}
    assert apart["rare"]["mrr@7"] == pytest.approx((1 + 1 / 7 + 1) / 3)
    assert evaluate(LastItem(10), Tiny(test, 10), ks=(7,)).by_popularity == {}  # without a log


def naive_metrics(
    model: LastItem, sequences: list[list[int]], k: int, held_out: int, keep_seen: bool
) -> dict[str, float]:
    n_items = len(model.catalogue)
    ranks: list[int | None] = []
    recommended = set()
    for sequence in sequences:
        history, target = sequence[:-held_out], sequence[-held_out]
        candidates = [item for item in range(n_items) if keep_seen or item not in history]
        order = sorted(candidates, key=lambda item: (abs(item - history[-1]), item))[:k]
        recommended.update(order)
        ranks.append(order.index(target) if target in order else None)
    hits = [rank for rank in ranks if rank is not None]
    return {
        f"ndcg@{k}": sum(1 / math.log2(rank + 2) for rank in hits) / len(ranks),
        f"hr@{k}": len(hits) / len(ranks),
        f"mrr@{k}": sum(1 / (rank + 1) for rank in hits) / len(ranks),
        f"cov@{k}": len(recommended) / n_items,
    }


def test_in_a_notebook_metrics_are_short() -> None:
    assert repr(Metrics({"ndcg@10": 2 / 3, "hr@10": 1.0}, users=1, seen_targets=0)) == (
        "Metrics(ndcg@10 0.6667, hr@10 1.0000 of 1 user)"
    )
    assert repr(Metrics({"mrr@1": 0.0}, users=2000, seen_targets=3)) == (
        "Metrics(mrr@1 0.0000 of 2,000 users; 3 targets seen before)"
    )


@given(
    sequences=st.lists(
        st.lists(st.integers(0, 19), min_size=3, max_size=9), min_size=1, max_size=9
    ),
    split=st.sampled_from(["validation", "test"]),
    keep_seen=st.booleans(),
    batch_size=st.integers(1, 10),
    k=st.integers(1, 20),
)
@settings(max_examples=60, deadline=None)
def test_equals_a_loop_over_users(
    sequences: list[list[int]],
    split: Literal["validation", "test"],
    keep_seen: bool,
    batch_size: int,
    k: int,
) -> None:
    held_out = 2 if split == "validation" else 1
    model = LastItem(20)
    found = evaluate(
        model,
        dataset_of(sequences, 20),
        split=split,
        ks=(k,),
        keep_seen=keep_seen,
        batch_size=batch_size,
    )
    assert found.values == pytest.approx(naive_metrics(model, sequences, k, held_out, keep_seen))
    assert found.users == len(sequences)
    assert (found.ranks > 0).mean() == pytest.approx(found[f"hr@{k}"])
    assert found.seen_targets == sum(row[-held_out] in row[:-held_out] for row in sequences)


def test_a_sasrec_equals_one_user_at_a_time() -> None:
    torch.manual_seed(0)
    model = SASRec(50, SASRecSettings(dim=16, max_length=6, dropout=0.5), seed=3)
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, 50, size=size).tolist() for size in (3, 4, 9, 12, 5)]
    ranks = []
    for sequence in sequences:
        history, target = sequence[:-1], sequence[-1]
        with torch.no_grad():
            states = model.eval()(torch.tensor([history[-6:]]))
        scores = states[0, -1] @ model.catalogue.T
        scores[history] = -torch.inf
        ranks.append(int((scores > scores[target]).sum()) if target not in history else 50)
    expected = sum(1 / (rank + 1) for rank in ranks if rank < 20) / len(ranks)

    model.train()
    found = evaluate(model, dataset_of(sequences, 50), split="test", ks=(20,), batch_size=2)

    assert found["mrr@20"] == pytest.approx(expected)
    again = evaluate(model, dataset_of(sequences, 50), split="test", ks=(20,), batch_size=5)
    assert again == found


def test_each_part_of_a_module_gets_its_own_mode_back() -> None:
    model = SASRec(10, SASRecSettings(dim=4))
    model.train()
    model.norm.eval()
    before = [part.training for part in model.modules()]
    dataset = dataset_of([[1, 2, 3]], 10)
    evaluate(model, dataset)
    assert [part.training for part in model.modules()] == before

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.catalogue = nn.Parameter(torch.zeros(10, 4))

        def forward(self, histories: Tensor) -> Tensor:
            assert not self.training
            raise RuntimeError("no states today")

    broken = Broken()
    with pytest.raises(RuntimeError, match="no states today"):
        evaluate(broken, dataset)
    assert broken.training


def test_popularity_is_a_ranker() -> None:
    train = lay_out([[1, 1, 1, 2, 2, 3]], [0])
    dataset = dataset_of([[1, 0, 2], [4, 3, 1], [3, 4, 0]], 5)
    found = evaluate(Popularity(train, 5), dataset, split="test", ks=(1, 2))
    assert found["hr@1"] == pytest.approx(2 / 3)  # 2 after 1 is left out; 1; not 0
    assert found["cov@2"] == pytest.approx(3 / 5)


def test_progress_reaches_all_users() -> None:
    seen: list[int] = []
    evaluate(LastItem(9), dataset_of([[1, 2, 3]] * 5, 9), batch_size=2, progress=seen.append)
    assert seen == [2, 4, 5]


def test_states_of_several_batches_are_computed_together() -> None:
    class Counted(LastItem):
        calls = 0

        def __call__(self, histories: Tensor) -> Tensor:
            self.calls += 1
            return super().__call__(histories)

    model, dataset = Counted(9), dataset_of([[1, 2, 3, 4]] * 40, 9)
    found = evaluate(model, dataset, batch_size=4)
    assert model.calls == 2  # of eight batches, and of two
    assert evaluate(model, dataset, batch_size=40) == found


def test_memory_does_not_grow_with_users() -> None:
    def bytes_alive(_: int) -> None:
        tensors = [thing for thing in gc.get_objects() if type(thing) is Tensor]
        tensors = [tensor for tensor in tensors if tensor.layout == torch.strided]
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        alive.append(sum(tensor.untyped_storage().nbytes() for tensor in storages.values()))

    alive: list[int] = []
    gc.collect()
    dataset = dataset_of([[1, 2, 3, 4]] * 40, 500)
    evaluate(LastItem(500), dataset, batch_size=4, progress=bytes_alive)
    assert len(alive) == 10
    assert max(alive) == alive[0] > 500


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "train"}, "split must be one of validation, test; got 'train'"),
        ({"ks": ()}, "ks names no depth"),
        ({"ks": (5, 0)}, "k must be at least 1; got 0"),
        ({"ks": (5, 10)}, "k is 10, but the catalogue has only 9 items; ask for fewer"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_impossible_evaluations_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluate(LastItem(9), dataset_of([[1, 2, 3]], 9), **options)  # type: ignore[arg-type]


def test_the_usual_depths_are_those_of_any_catalogue() -> None:
    values = evaluate(LastItem(9), dataset_of([[1, 2, 3]], 9), keep_seen=True).values
    assert values["hr@50"] == values["hr@10"] == 1.0


def test_a_model_of_another_dataset_is_refused() -> None:
    with pytest.raises(InputError, match="the model ranks 8 items, the dataset has 9"):
        evaluate(LastItem(8), dataset_of([[1, 2, 3]], 9))
