"""RECE against loops over rounds, states and items."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sce.losses import ReducedCrossEntropy
from sce.losses import reduced as module


def reference(
    states: Tensor, catalogue: Tensor, targets: Tensor, bias: Tensor, vectors: Tensor, extra: int
) -> Tensor:
    """The loss of each state, for the random vectors [rounds, chunks, d]."""
    v, c, n_chunks = len(states), len(catalogue), vectors.shape[1]
    negatives: list[set[int]] = [set() for _ in range(v)]
    for of_round in vectors:
        chunks = []
        for rows in (states, catalogue):
            nearest = [int((of_round @ row).argmax()) for row in rows]
            order = sorted(range(len(rows)), key=lambda i: (nearest[i], i))
            chunks.append({i: place * n_chunks // len(rows) for place, i in enumerate(order)})
        for i in range(v):
            negatives[i] |= {j for j in range(c) if abs(chunks[0][i] - chunks[1][j]) <= extra}
    losses = []
    for i in range(v):
        logits, target = catalogue @ states[i] + bias, int(targets[i])
        kept = [target, *sorted(negatives[i] - {target})]
        losses.append(logits[kept].logsumexp(0) - logits[target])
    return torch.stack(losses)


@pytest.mark.parametrize("at_once", [1, 1 << 22])
@pytest.mark.parametrize(
    ("v", "c", "d", "rounds", "extra", "n_buckets"),
    [
        (13, 30, 4, 1, 1, None),
        (13, 30, 4, 3, 0, 5),
        (40, 7, 3, 4, 2, None),  # more states than items
        (5, 50, 8, 2, 1, 9),  # chunks without a state
        (3, 4, 2, 2, 0, 99),  # more buckets than items
        (1, 1, 2, 2, 1, 3),
    ],
)
def test_loss_and_gradients_are_those_of_loops(
    v: int,
    c: int,
    d: int,
    rounds: int,
    extra: int,
    n_buckets: int | None,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    g = torch.Generator().manual_seed(v)
    shapes = ((v, d), (c, d), (c,))
    given = [torch.randn(s, dtype=torch.float64, generator=g).requires_grad_() for s in shapes]
    states, catalogue, bias = given
    targets = torch.randint(c, (v,), generator=g)
    loss = ReducedCrossEntropy(
        rounds=rounds, extra_chunks=extra, n_buckets=n_buckets, reduction="none"
    )
    found = loss(states, catalogue, targets, generator=g.manual_seed(1), bias=bias)
    n_chunks = min(n_buckets, c) if n_buckets else int((4 * (1 + 2 * extra) * min(c, v)) ** 0.5)
    drawn = [torch.empty(n_chunks, d, dtype=torch.float64) for _ in range(rounds)]
    g.manual_seed(1)
    vectors = torch.stack([each.normal_(generator=g) for each in drawn])
    expected = reference(states, catalogue, targets, bias, vectors, extra)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(v, dtype=torch.float64, generator=g)
    for mine, theirs in zip(
        torch.autograd.grad((found * weights).sum(), given),
        torch.autograd.grad((expected * weights).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_with_chunks_enough_it_is_exact_cross_entropy() -> None:
    g = torch.Generator().manual_seed(0)
    states, catalogue = torch.randn(20, 8, generator=g), torch.randn(50, 8, generator=g)
    targets = torch.randint(50, (20,), generator=g)
    exact = torch.nn.functional.cross_entropy(states @ catalogue.T, targets)
    for rounds in (1, 3):  # what several rounds bring counts once
        loss = ReducedCrossEntropy(rounds=rounds, n_buckets=4, extra_chunks=3)
        torch.testing.assert_close(loss(states, catalogue, targets), exact)


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"extra_chunks": -1}, {"n_buckets": 0}])
def test_sizes_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be at least"):
        ReducedCrossEntropy(**wrong)
