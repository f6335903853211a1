"""Several batches in a step: by as many processes, and by one that accumulates them."""

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sce.cli import main
from sce.data.batches import DeviceSequences
from sce.data.prepared import PreparedDataset
from sce.distributed import Ranks
from sce.errors import InputError
from sce.losses import CrossEntropy, ScalableCrossEntropy
from sce.models.sasrec import SASRec
from sce.training.checkpoint import read_tensors
from sce.training.optimizer import make_optimizer
from sce.training.settings import TrainingSettings
from sce.training.signals import TrainingInterrupted
from sce.training.slices import SlicedStep, seeds_of_slice
from sce.training.step import StepSeeds, TrainingStep
from tests.cycle_data import MODEL, make_cycle, train
from tests.distributed.pool import hold_store, run_launched

CPU = torch.device("cpu")
needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)
pytestmark = pytest.mark.filterwarnings("ignore::sce.errors.TrainingWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cycle(tmp_path_factory.mktemp("data") / "cycle", items=30).path


def plain(states: Tensor, catalogue: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(
        (states @ catalogue.T).flatten(0, 1), targets.flatten(), ignore_index=-100
    )


class Interrupted(CrossEntropy):
    """Sends a signal to its own process, if that is rank 1, at some step."""

    calls = 0

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        self.calls += 1
        if os.environ.get("RANK") == "1" and self.calls == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return super().forward(*inputs, **options)


LOSSES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "dense": (CrossEntropy(), {"clip_norm": 0.5}),
    "paper's rule": (ScalableCrossEntropy.paper(bucket_size_y=7, bucket_size_x=3), {}),
    "row-wise": (ScalableCrossEntropy(bucket_size_y=7), {"row_wise": True}),
    "a function": (plain, {}),
    "a sum": (CrossEntropy(reduction="sum"), {}),
    "interrupted": (Interrupted(), {}),
}


def run(out: Path, data: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Train with 5 sequences a batch, so that the last step has batches that are empty."""
    dataset, (loss, others) = PreparedDataset.load(data), LOSSES[name]
    model = SASRec(dataset.n_items, MODEL, dropout=0.2)
    changes = {"batch_size": 5, **others, **changes}
    result = train(dataset, loss, model=model, out=out, **changes)
    found = {"test": result.test, "loss": [record["loss"] for record in result.history]}
    weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return found | {"weights": weights}


def as_rank(rank: int, directory: Path, data: Path, name: str, changes: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    try:
        found: Any = run(directory / "run", data, name, **changes)
    except (TrainingInterrupted, InputError) as error:
        found = f"{type(error).__name__}: {error}"
    (directory / str(rank)).write_text(json.dumps(found))


def by_ranks(size: int, directory: Path, data: Path, name: str, **changes: Any) -> list[Any]:
    directory.mkdir(exist_ok=True)
    assert run_launched(size, as_rank, directory, data, name, changes) == [0] * size
    return [json.loads((directory / str(rank)).read_text()) for rank in range(size)]


def state(directory: Path) -> dict[str, Any]:
    tensors, metadata = read_tensors(directory / "run" / "resume.safetensors")
    return {name: t.tolist() for name, t in tensors.items()} | {"run": metadata["run"]}


@needs_gloo
@pytest.mark.parametrize("name", ["dense", "paper's rule", "row-wise", "a function", "a sum"])
def test_ranks_give_what_one_process_accumulates(name: str, tmp_path: Path, data: Path) -> None:
    alone = by_ranks(1, tmp_path / "alone", data, name, accumulate=3)
    found = by_ranks(3, tmp_path / "ranks", data, name)
    assert found == 3 * alone
    assert state(tmp_path / "ranks") == state(tmp_path / "alone")


@needs_gloo
@pytest.mark.parametrize("name", ["dense", "paper's rule", "row-wise"])
def test_ranks_that_accumulate_as_well(name: str, tmp_path: Path, data: Path) -> None:
    alone = by_ranks(1, tmp_path / "alone", data, name, accumulate=4)
    assert by_ranks(2, tmp_path / "ranks", data, name, accumulate=4) == 2 * alone


def test_batches_that_are_accumulated_are_one_batch(data: Path) -> None:
    dataset = PreparedDataset.load(data)
    whole = train(dataset, batch_size=16, epochs=4)
    parts = train(dataset, batch_size=4, accumulate=4, epochs=4)
    losses = [[record["loss"] for record in result.history] for result in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


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


@needs_gloo
def test_a_signal_to_one_rank_saves_once_and_another_number_goes_on(
    tmp_path: Path, data: Path
) -> None:
    said = by_ranks(2, tmp_path / "ranks", data, "interrupted")
    run_directory = tmp_path / "ranks" / "run"
    assert said == 2 * [
        "TrainingInterrupted: stopped in epoch 1 after step 3 of 5; everything is saved in "
        f"{run_directory}"
    ]
    assert not list(run_directory.glob(".*"))
    alone = by_ranks(1, tmp_path / "ranks", data, "interrupted", resume=True)
    assert alone == by_ranks(1, tmp_path / "alone", data, "interrupted", accumulate=2)
    assert state(tmp_path / "ranks") == state(tmp_path / "alone")


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
    train(dataset, Stopped(), out=tmp_path / "whole" / "run", loss_name="ce", **given)
    assert state(tmp_path) == state(tmp_path / "whole")


def test_batches_of_a_step_that_are_empty_take_no_time(data: Path) -> None:
    dataset = PreparedDataset.load(data)
    few, many = (
        train(dataset, batch_size=5, accumulate=number).history for number in (11, 1_000_000)
    )
    assert [record["loss"] for record in few] == [record["loss"] for record in many]


@needs_gloo
def test_a_signal_within_a_step_of_one_rank_is_known_to_all(tmp_path: Path, data: Path) -> None:
    said = by_ranks(2, tmp_path, data, "interrupted", accumulate=48, batch_size=1)
    assert said == 2 * [
        "TrainingInterrupted: stopped in epoch 1 after step 0 of 1; everything is saved in "
        f"{tmp_path / 'run'}"
    ]


@needs_gloo
def test_ranks_resume_together(tmp_path: Path, data: Path) -> None:
    whole = by_ranks(1, tmp_path / "alone", data, "dense", accumulate=2, epochs=3)
    by_ranks(2, tmp_path / "ranks", data, "dense", epochs=1)
    assert by_ranks(2, tmp_path / "ranks", data, "dense", epochs=3, resume=True) == 2 * whole


@needs_gloo
def test_other_numbers_of_processes_are_refused(tmp_path: Path, data: Path) -> None:
    said = by_ranks(2, tmp_path / "ranks", data, "dense", accumulate=3)
    expected = "2 processes cannot share the 3 batches of a step equally (accumulate)"
    assert all(expected in each for each in said)


def test_a_captured_step_has_one_batch(data: Path) -> None:
    with pytest.raises(InputError, match="capture captures a step of one batch; leave it out"):
        train(PreparedDataset.load(data), accumulate=2, capture=True)


def command(rank: int, directory: Path, data: Path, attempt: int, *flags: str) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    options = ["--loss", "ce", "--epochs", "1", "--device", "cpu", "--model.dim", "8"]
    file = (directory / f"{rank}.txt").open("w")
    with file, redirect_stdout(file), redirect_stderr(file):
        code = main(["train", str(data), "--out", str(directory / "run"), *options, *flags])
    sys.exit(code)


@needs_gloo
def test_the_command_tells_once_and_goes_on_when_started_again(tmp_path: Path, data: Path) -> None:
    store = hold_store()
    for attempt, said in enumerate(["NDCG@10", "training has ended already"]):
        assert run_launched(2, command, tmp_path, data, attempt, store=store) == [0, 0]
        assert said in (tmp_path / "0.txt").read_text()
        assert (tmp_path / "1.txt").read_text() == ""


@needs_gloo
def test_a_command_that_is_started_again_takes_up_its_own_run_alone(
    tmp_path: Path, data: Path
) -> None:
    runs = []
    first, second, third = hold_store(), hold_store(), hold_store()
    for store, attempt, flags, code, said in (
        (first, 0, (), 0, "NDCG@10"),
        (second, 1, ("--force",), 0, "NDCG@10"),  # the attempt before was killed early
        (second, 2, ("--force",), 0, "training has ended already"),
        (third, 1, (), 2, "exists; go on with --resume, replace it with --force"),
    ):
        assert run_launched(1, command, tmp_path, data, attempt, *flags, store=store) == [code]
        assert said in (tmp_path / "0.txt").read_text()
        runs.append((tmp_path / "run").stat().st_ino)
    assert runs[0] != runs[1] == runs[2] == runs[3]
