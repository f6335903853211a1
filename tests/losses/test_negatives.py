import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sce.losses import (
    BinaryCrossEntropy,
    GeneralizedBinaryCrossEntropy,
    InBatchNegatives,
    MixedNegatives,
    PopularityNegatives,
    SampledCrossEntropy,
    UniformNegatives,
)
from sce.losses.negatives import Draw

TARGETS = torch.tensor([0, 0, 1, 3])


def assert_shares(items: torch.Tensor, shares: list[float]) -> None:
    n = items.numel()
    wanted = torch.tensor(shares, dtype=torch.float64)
    error = (wanted * (1 - wanted) / n).sqrt()
    counts = torch.bincount(items.flatten(), minlength=len(shares))
    assert ((counts / n - wanted).abs() <= 5 * error).all()


def test_uniform_draws_every_item_alike() -> None:
    g = torch.Generator().manual_seed(0)
    items, log_expected = UniformNegatives()(1000, 50, 5, TARGETS, generator=g)
    assert items.shape == (1000, 50)
    assert log_expected is None
    assert_shares(items, [0.2] * 5)


def test_uniform_may_be_scaled_up_to_the_catalogue() -> None:
    items, log_expected = UniformNegatives(correct=True)(3, 4, 5, TARGETS)
    assert items.shape == (3, 4)
    torch.testing.assert_close(log_expected, torch.full((3, 4), math.log(4 / 5)))
    with pytest.raises(TypeError, match="correct must be True or False"):
        UniformNegatives(correct="yes")  # type: ignore[arg-type]


def test_mixed_draws_half_of_the_batch_and_half_of_all() -> None:
    g = torch.Generator().manual_seed(4)
    items, log_expected = MixedNegatives()(100, 501, 5, TARGETS, generator=g)
    batch, alike = torch.tensor([0.5, 0.25, 0, 0.25, 0]), torch.full((5,), 0.2)
    assert_shares(items[:, :250], batch.tolist())
    assert_shares(items[:, 250:], alike.tolist())
    torch.testing.assert_close(log_expected, (250 * batch + 251 * alike).log()[items])
    seen = torch.tensor([5, 1, 2, 1, 1])
    items, log_expected = MixedNegatives(seen)(3, 4, 5, TARGETS, generator=g)
    torch.testing.assert_close(log_expected, (2 * seen / 10 + 2 * alike).log()[items])
    assert MixedNegatives(correct=False)(3, 4, 5, TARGETS).log_expected is None
    items, log_expected = MixedNegatives()(2, 4, 5, TARGETS[:0])  # nothing but padding
    assert items.shape == (2, 4)
    torch.testing.assert_close(log_expected, torch.full((2, 4), math.log(4 / 5)))


def test_popularity_follows_counts_and_power() -> None:
    g = torch.Generator().manual_seed(2)
    seen = torch.tensor([4, 0, 1, 9])
    items, log_expected = PopularityNegatives(seen)(100, 500, 4, TARGETS, generator=g)
    assert_shares(items, [4 / 14, 0, 1 / 14, 9 / 14])
    assert log_expected is None
    items, _ = PopularityNegatives(seen, power=0.5)(100, 500, 4, TARGETS, generator=g)
    assert_shares(items, [2 / 6, 0, 1 / 6, 3 / 6])
    items, _ = PopularityNegatives(seen, power=0.0)(100, 500, 4, TARGETS, generator=g)
    assert_shares(items, [1 / 3, 0, 1 / 3, 1 / 3])
    sampler = PopularityNegatives(seen, correct=True)
    items, log_expected = sampler(2, 8, 4, TARGETS, generator=g)
    wanted = torch.tensor([4 / 14, 0, 1 / 14, 9 / 14]).log()[items] + math.log(8)
    torch.testing.assert_close(log_expected, wanted)


def test_in_batch_draws_the_targets_of_the_batch() -> None:
    g = torch.Generator().manual_seed(3)
    items, log_expected = InBatchNegatives()(100, 500, 5, TARGETS, generator=g)
    shares = [0.5, 0.25, 0, 0.25, 0]
    assert_shares(items, shares)
    torch.testing.assert_close(log_expected, torch.tensor(shares).log()[items] + math.log(500))
    seen = torch.tensor([5, 1, 2, 1, 1])
    items, log_expected = InBatchNegatives(seen)(3, 4, 5, TARGETS, generator=g)
    torch.testing.assert_close(log_expected, (seen / 10).log()[items] + math.log(4))
    assert InBatchNegatives(correct=False)(3, 4, 5, TARGETS, generator=g).log_expected is None
    unseen = torch.tensor([5, 0, 2, 1, 1])  # item 1 is in the batch, so it occurs
    assert InBatchNegatives(unseen)(9, 9, 5, TARGETS).log_expected.isfinite().all()
    assert InBatchNegatives()(1, 4, 5, TARGETS[:0]).items.shape == (1, 0)


def test_counts_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match=r"counts must be \[items\], got shape \(2, 2\)"):
        PopularityNegatives(torch.ones(2, 2))
    for bad in ([-1.0, 2.0], [0.0, 0.0], [float("inf"), 1.0]):
        with pytest.raises(ValueError, match="must be finite, not negative, not all zero"):
            PopularityNegatives(torch.tensor(bad))
    for power in (400.0, -400.0):  # beyond what a number holds
        with pytest.raises(ValueError, match=f"counts, to the power {power}, must be finite"):
            PopularityNegatives(torch.tensor([10, 20]), power=power)
    for power in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"power must be finite, got {power}"):
            PopularityNegatives(torch.ones(3), power=power)
    for sampler in (PopularityNegatives, InBatchNegatives, MixedNegatives):
        with pytest.raises(TypeError, match="counts must be a tensor, got list"):
            sampler([1, 2, 3])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="correct must be True or False, got 'yes'"):
            sampler(torch.ones(3), correct="yes")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="counts are for 3 items, the catalogue has 4"):
            sampler(torch.ones(3))(1, 1, 4, TARGETS)


def test_popularity_survives_a_model_in_half_precision() -> None:
    sampler = PopularityNegatives(torch.ones(50_000)).to(torch.bfloat16)
    items = sampler(100, 1000, 50_000, torch.zeros(1, dtype=torch.long)).items
    assert len(items.unique()) > 40_000


def test_a_sampler_of_ones_own() -> None:
    class Last:
        correct = False
        shape = (1, 2)
        beyond = 0

        def __call__(self, rows: int, k: int, n_items: int, targets: Tensor, **_: Any) -> Draw:
            return Draw(torch.full(self.shape, n_items - 1) - self.beyond, None)

    states, catalogue = torch.randn(4, 3), torch.randn(9, 3)
    loss = SampledCrossEntropy(2, negatives=Last(), shared="batch")
    logits = states @ catalogue.T
    own = logits.gather(1, TARGETS.unsqueeze(1))
    wanted = torch.cat([own, logits[:, [8, 8]]], dim=1).logsumexp(dim=1) - own.squeeze(1)
    torch.testing.assert_close(loss(states, catalogue, TARGETS), wanted.mean())
    assert "negatives=" in repr(loss)
    assert isinstance(loss.negatives, Last)
    loss.negatives.shape = (3, 2)
    with pytest.raises(ValueError, match=r"must return items \[1, k\], got shape \(3, 2\)"):
        loss(states, catalogue, TARGETS)
    loss.negatives.shape, loss.negatives.beyond = (1, 2), 10
    with pytest.raises(ValueError, match="must return items from 0 to 8, got -2"):
        loss(states, catalogue, TARGETS)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ("uniform", r"must be a sampler such as UniformNegatives\(\) .*, got 'uniform'"),
        (UniformNegatives, "must be a sampler such as .*, got <class"),
        (lambda *_: None, "function must have an attribute `correct`"),
    ],
)
def test_what_is_no_sampler_is_refused(sampler: Any, message: str) -> None:
    for make in (SampledCrossEntropy, BinaryCrossEntropy, GeneralizedBinaryCrossEntropy):
        with pytest.raises(TypeError, match=message):
            make(4, negatives=sampler)
