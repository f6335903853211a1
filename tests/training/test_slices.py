"""Several batches in a step, which one process accumulates."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sce.data.batches import DeviceSequences
from sce.data.prepared import PreparedDataset
from sce.distributed import Ranks
from sce.errors import InputError
from sce.losses import CrossEntropy, ScalableCrossEntropy
from sce.models.sasrec import SASRec
from sce.training.optimizer import make_optimizer
from sce.training.settings import TrainingSettings
from sce.training.signals import TrainingInterrupted
from sce.training.slices import SlicedStep, seeds_of_slice
from sce.training.step import StepSeeds, TrainingStep
from tests.cycle_data import MODEL, make_cycle, train
from tests.training.outcomes import outcome

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::sce.errors.TrainingWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cycle(tmp_path_factory.mktemp("data") / "cycle", items=30).path


def test_batches_that_are_accumulated_are_one_batch(data: Path) -> None:
    dataset = PreparedDataset.load(data)
    whole = train(dataset, batch_size=16, epochs=4)
    parts = train(dataset, batch_size=4, accumulate=4, epochs=4)
    losses = [[record["loss"] for record in result.history] for result in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_frozen_weight_stays_as_it_is(data: Path) -> None:
    dataset = PreparedDataset.load(data)
    model = SASRec(dataset.n_items, MODEL)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.positions.requires_grad_(False)
    train(dataset, model=model, accumulate=2)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]) is (name == "positions")


class Torchs(nn.CrossEntropyLoss):
    """A loss of one's own."""

    def forward(self, states: Tensor, catalogue: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward((states @ catalogue.T).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_of_ones_own_is_accumulated_as_its_reduction_says(
    reduction: str, data: Path
) -> None:
    dataset, found = PreparedDataset.load(data), []
    for loss in (Torchs(reduction=reduction), CrossEntropy(reduction=reduction)):
        for batches in (1, 4):
            settings: Any = {"batch_size": 16 // batches, "accumulate": batches, "epochs": 2}
            found.append([one["loss"] for one in train(dataset, loss=loss, **settings).history])
    assert found[1:] == 3 * [pytest.approx(found[0], rel=1e-4)]


@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.parametrize("paper", [False, True])
def test_one_batch_is_a_plain_step(paper: bool, row_wise: bool, data: Path) -> None:
    settings = TrainingSettings(batch_size=20, row_wise=row_wise)
    sequences = DeviceSequences.place(PreparedDataset.load(data).train)
    found = []
    for sliced in (False, True):
        rule: Any = {"coverage": False, "bucket_size_x": 4} if paper else {}
        loss = ScalableCrossEntropy(n_buckets=3, bucket_size_y=5, sparse_grad=row_wise, **rule)
        model = SASRec(30, MODEL, dropout=0.5).train()
        table = model.catalogue if row_wise else None
        model.sparse_grad = row_wise
        optimizer = make_optimizer(model.parameters(), settings, device=CPU, row_wise=table)
        given = (model, loss, optimizer, sequences, settings)
        step = TrainingStep(*given, device=CPU, max_length=6)
        if sliced:
            options: Any = {"ranks": Ranks(), "slices": 1, "row_wise": table}
            step = SlicedStep(*given, device=CPU, max_length=6, **options)
        seeds = StepSeeds(1, 2)
        seeds = seeds if sliced else seeds_of_slice(seeds, 0)
        results = [step(torch.arange(12), seeds, with_statistics=True) for _ in range(3)]
        found.append([(result.loss, result.statistics) for result in results])
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


class Stopped(CrossEntropy):
    """Sends a signal to its own process at some batch."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.at, self.calls = at, [0]  # which a step's copy of the loss shares

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        self.calls[0] += 1
        if self.calls[0] == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(*inputs, **options)


@pytest.mark.parametrize("save_minutes", [0.0, 10.0])
def test_a_signal_within_a_step_loses_that_step_alone(
    save_minutes: float, tmp_path: Path, data: Path
) -> None:
    given: Any = {"batch_size": 2, "accumulate": 6, "save_minutes": save_minutes}
    dataset, loss = PreparedDataset.load(data), Stopped(at=6 * 2 + 3)  # of 4 steps the third
    with pytest.raises(TrainingInterrupted, match="in epoch 1 after step 2 of 4; everything"):
        train(dataset, loss, out=tmp_path / "run", loss_name="ce", **given)
    assert loss.calls == [loss.at]
    train(dataset, Stopped(), out=tmp_path / "run", loss_name="ce", resume=True, **given)
    train(dataset, Stopped(), out=tmp_path / "whole", loss_name="ce", **given)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_batches_of_a_step_that_are_empty_take_no_time(data: Path) -> None:
    dataset = PreparedDataset.load(data)
    few, many = (
        train(dataset, batch_size=5, accumulate=number).history for number in (11, 1_000_000)
    )
    assert [record["loss"] for record in few] == [record["loss"] for record in many]


def test_a_captured_step_has_one_batch(data: Path) -> None:
    with pytest.raises(InputError, match="capture captures a step of one batch; leave it out"):
        train(PreparedDataset.load(data), accumulate=2, capture=True)
