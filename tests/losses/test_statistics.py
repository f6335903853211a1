import pytest
import torch
from torch import Tensor

from sce.losses import statistics
from sce.losses.buckets import Buckets
from sce.losses.statistics import count_buckets


def test_a_worked_example() -> None:
    buckets = Buckets(
        states=torch.tensor([[0, 1], [1, 2], [1, 3]]), items=torch.tensor([[9, 5], [7, 4], [0, 7]])
    )
    targets = torch.tensor([5, 7, 8, -1, 3])
    found = count_buckets(buckets, targets, placed=torch.tensor([True, True, True, False, False]))
    assert found.picked_once == 2 / 4  # states 0 and 2; 3 has no target, 4 is nowhere
    assert found.placed == 3 / 4
    assert found.correct_in_bucket == 3 / 5  # 5 in the first, 7 in the second and in the third


@pytest.mark.parametrize("at_once", [1, 13, 30, 1 << 18])
def test_how_many_are_sorted_at_once_does_not_matter(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    items = torch.stack([torch.randperm(30, generator=generator)[:6] for _ in range(7)]).int()
    states = torch.randint(40, (7, 9), generator=generator).int()
    targets = torch.randint(-1, 30, (40,), generator=generator)
    monkeypatch.setattr(statistics, "_SORTED", at_once)
    sizes = []

    def search(items: Tensor, own: Tensor) -> Tensor:
        sizes.append(items.numel())
        return usual(items, own)

    usual = torch.searchsorted
    monkeypatch.setattr(torch, "searchsorted", search)
    found = count_buckets(Buckets(states, items), targets, targets >= 0)
    rows = [(s, b) for b in range(7) for s in states[b].tolist() if targets[s] >= 0]
    correct = sum(int(targets[s]) in items[b].tolist() for s, b in rows)
    assert found.correct_in_bucket == pytest.approx(correct / len(rows))
    assert max(sizes) <= max(6, at_once)  # a bucket, or as many as fit
    assert sum(sizes) == items.numel()
