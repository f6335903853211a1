from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sce.data.batches import DeviceSequences, training_batch
from sce.data.prepared import PreparedDataset
from sce.errors import InputError
from sce.losses import CrossEntropy, ScalableCrossEntropy
from sce.models.sasrec import SASRec, SASRecSettings
from sce.training.checkpoint import read_tensors
from sce.training.fit import FitResult
from sce.training.optimizer import make_optimizer, row_wise_table, sparse_gradients
from sce.training.run import Run
from sce.training.settings import TrainingSettings
from sce.training.step import StepSeeds, TrainingStep
from tests import cycle_data
from tests.cycle_data import lay_out, walk

CPU = torch.device("cpu")
SHAPE = SASRecSettings(dim=8, blocks=1, dropout=0.0, max_length=6)


def make_loss() -> ScalableCrossEntropy:
    return ScalableCrossEntropy(
        n_buckets=4, coverage=False, bucket_size_x=5, bucket_size_y=3, backend="torch"
    )


def gradient(sparse: bool, histories: Tensor, targets: Tensor, n_items: int) -> Tensor:
    model, loss = SASRec(n_items, SHAPE), make_loss()
    model.sparse_grad = loss.sparse_grad = sparse
    generator = torch.Generator().manual_seed(0)
    loss(model(histories), model.catalogue, targets, generator=generator).backward()
    assert model.catalogue.grad is not None
    return model.catalogue.grad


def test_lookups_and_loss_add_up_to_the_dense_gradient() -> None:
    sequences = DeviceSequences.place(lay_out([walk(s, 3 + s) for s in range(4)], range(4)))
    batch = training_batch(sequences, torch.arange(4), max_length=6)
    dense = gradient(False, *batch, n_items=300)
    found = gradient(True, *batch, n_items=300)
    assert not dense.is_sparse
    assert found.is_sparse
    assert found._nnz() < 300
    torch.testing.assert_close(found.to_dense(), dense)


def test_a_step_moves_what_it_touched_and_nothing_else() -> None:
    sequences = DeviceSequences.place(lay_out([walk(s, 3 + s % 5) for s in range(20)], range(20)))
    model, loss = SASRec(300, SHAPE), make_loss()
    other = SASRec(300, SHAPE)
    settings = TrainingSettings(
        learning_rate=0.1, batch_size=3, row_wise=True, catalogue_learning_rate=0.2
    )
    optimizer = make_optimizer(model.parameters(), settings, device=CPU, row_wise=model.catalogue)
    step = TrainingStep(model, loss, optimizer, sequences, settings, device=CPU, max_length=6)
    rows = torch.tensor([3, 1, 4])
    with sparse_gradients(model, loss, wanted=True):
        step(rows, StepSeeds(1, 2))
    # By hand, with dense gradients and the definition.
    other.sparse_grad = loss.sparse_grad = True
    batch = training_batch(sequences, rows, max_length=6)
    generator = torch.Generator().manual_seed(2)
    loss(other(batch.histories), other.catalogue, batch.targets, generator=generator).backward()
    assert other.catalogue.grad is not None
    total = other.catalogue.grad.to_dense()
    before = SASRec(300, SHAPE).catalogue.detach()
    sums = total.square().mean(dim=1, keepdim=True)
    expected = before - 0.2 * total / (sums.sqrt() + 1e-8)
    torch.testing.assert_close(model.catalogue.detach(), expected)
    untouched = (total == 0).all(dim=1)
    assert 200 < int(untouched.sum()) < 300
    assert torch.equal(model.catalogue[untouched], before[untouched])
    # The positions had Adam's first step, which has the size of the learning rate.
    moved = (model.positions - SASRec(300, SHAPE).positions).abs()
    assert moved.max().item() == pytest.approx(0.1, rel=1e-3)


def test_switches_are_put_back() -> None:
    model, loss = SASRec(9, SHAPE), make_loss()
    loss.sparse_grad = True
    during = []

    def fail() -> None:
        during.extend([model.sparse_grad, loss.sparse_grad])
        raise KeyError

    with pytest.raises(KeyError), sparse_gradients(model, loss, wanted=True):
        fail()
    assert during == [True, True]
    assert (model.sparse_grad, loss.sparse_grad) == (False, True)
    with sparse_gradients(model, CrossEntropy(), wanted=False):
        assert not model.sparse_grad


class Plain(nn.Module):
    def __init__(self, n_items: int) -> None:
        super().__init__()
        self.catalogue = nn.Parameter(torch.zeros(n_items, 8))


def test_a_table_may_be_all_that_is_trained() -> None:
    table = nn.Parameter(torch.ones(3, 2))
    settings = TrainingSettings(row_wise=True, catalogue_learning_rate=0.2)
    optimizer = make_optimizer([table], settings, device=CPU, row_wise=table)
    table.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (3, 2))
    optimizer.step()
    assert table.detach().ne(1).any(1).tolist() == [False, True, False]


def test_who_cannot_be_updated_by_rows() -> None:
    with pytest.raises(InputError, match="only the loss sce goes with"):
        row_wise_table(SASRec(9, SHAPE), CrossEntropy())
    with pytest.raises(InputError, match="while `sparse_grad` is True; got Plain"):
        row_wise_table(Plain(9), make_loss())


# --- whole runs


def train(dataset: PreparedDataset, out: Path, **changes: Any) -> FitResult:
    model = SASRec(dataset.n_items, dim=8, blocks=1, dropout=0.3, max_length=6)
    chosen: dict[str, Any] = {"epochs": 3, "catalogue_learning_rate": 0.1, "row_wise": True}
    found: FitResult = cycle_data.train(
        dataset, make_loss(), model=model, out=out, resume=True, **(chosen | changes)
    )
    return found


def test_rows_learn(dataset: PreparedDataset, tmp_path: Path) -> None:
    result = train(dataset, tmp_path / "run", epochs=30, patience=0)
    records = Run.open(tmp_path / "run").metrics()
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]
    assert result.test is not None
    assert result.popularity is not None
    assert result.test["ndcg@10"] > result.popularity["test"]["ndcg@10"]


def test_after_a_loss_that_is_no_number_the_rate_of_the_catalogue_may_be_lowered(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="or catalogue_learning_rate"):
        train(dataset, tmp_path / "run", catalogue_learning_rate=1e38)
    assert train(dataset, tmp_path / "run", catalogue_learning_rate=0.1).epochs == 3


def test_another_way_of_updating_is_no_resumption(dataset: PreparedDataset, tmp_path: Path) -> None:
    train(dataset, tmp_path / "run", epochs=1)
    state, _ = read_tensors(tmp_path / "run" / "resume.safetensors")
    assert len(state["optimizer.sum.model.catalogue"]) == dataset.n_items
    assert "optimizer.exp_avg.model.catalogue" not in state
    assert "optimizer.exp_avg.model.positions" in state
    with pytest.raises(InputError, match=r"training.row_wise was True and is now False"):
        train(dataset, tmp_path / "run", row_wise=False, catalogue_learning_rate=None)


def test_without_it_gradients_are_dense_whatever_the_loss_is_made_for(
    dataset: PreparedDataset,
) -> None:
    # Adam takes no others.
    model, loss = SASRec(dataset.n_items, SHAPE), make_loss()
    model.sparse_grad = loss.sparse_grad = True
    assert cycle_data.train(dataset, loss, model=model, epochs=1).epochs == 1
    assert (model.sparse_grad, loss.sparse_grad) == (True, True)
