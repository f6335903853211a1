import math

import pytest
import torch

from sce.training.capture import StepResult
from sce.training.checkpoint import EpochSoFar
from sce.training.watch import LOOK_EVERY, DivergenceError, LossWatch


def make_watch(so_far: EpochSoFar) -> LossWatch:
    return LossWatch(
        so_far,
        epoch=4,
        device=torch.device("cpu"),
        explain=lambda what, rows: f"{what}, rows {list(rows)}",
    )


def add(watch: LossWatch, step: int, loss: float, targets: int = 1, stats: bool = False) -> None:
    statistics = torch.tensor([0.1, 0.2, 0.3]) if stats else None
    watch.add(StepResult(torch.tensor(loss), statistics), step, torch.tensor([step, 7]), targets)


def test_losses_count_once_looked_at() -> None:
    so_far = EpochSoFar()
    watch = make_watch(so_far)
    add(watch, 1, 2.0, targets=10, stats=True)
    add(watch, 2, 5.0, targets=20)
    assert so_far.step == 0
    watch.look()
    assert (so_far.step, so_far.targets, so_far.loss_sum, watch.last) == (2, 30, 120.0, 5.0)
    assert so_far.bucket_samples == 1
    assert so_far.bucket_sums == pytest.approx([0.1, 0.2, 0.3])
    watch.look()
    assert so_far.targets == 30
    add(watch, 3, 1.0, targets=5)
    watch.look()
    assert (so_far.step, so_far.targets, so_far.loss_sum) == (3, 35, 125.0)


def test_when_one_looks_changes_nothing() -> None:
    losses = torch.rand(LOOK_EVERY, generator=torch.Generator().manual_seed(3)).tolist()
    often, rarely = EpochSoFar(), EpochSoFar()
    for so_far, each in [(often, True), (rarely, False)]:
        watch = make_watch(so_far)
        for step, loss in enumerate(losses, 1):
            assert not watch.full
            add(watch, step, loss, targets=step)
            if each:
                watch.look()
        assert watch.full != each
        watch.look()
    assert often == rarely


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_the_first_loss_that_is_no_number_is_named(wrong: float) -> None:
    so_far = EpochSoFar()
    watch = make_watch(so_far)
    for step, loss in enumerate([1.0, 2.0, wrong, math.nan, 3.0], 11):
        add(watch, step, loss)
    with pytest.raises(
        DivergenceError, match=rf"became {wrong} at step 13 of epoch 4, rows .13, 7"
    ) as caught:
        watch.look()
    assert (caught.value.epoch, caught.value.step, caught.value.rows) == (4, 13, [13, 7])
    assert so_far.step == 12  # what was good before it
