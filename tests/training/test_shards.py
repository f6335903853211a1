"""A sharded catalogue in training: by some processes, and by one."""

import json
import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sce.cli import main
from sce.data.prepared import PreparedDataset
from sce.errors import InputError, RankError
from sce.losses import CrossEntropy, ScalableCrossEntropy
from sce.models.sasrec import SASRec
from sce.recommend import Recommender
from sce.training.checkpoint import read_tensors
from sce.training.settings import TrainingSettings
from sce.training.signals import TrainingInterrupted
from tests.cycle_data import MODEL, make_cycle, train
from tests.distributed.pool import run_launched

needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)
pytestmark = pytest.mark.filterwarnings("ignore::sce.errors.TrainingWarning")
ITEMS = 31


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cycle(tmp_path_factory.mktemp("data") / "cycle", items=ITEMS).path


class Struck(SASRec):
    """Sends a signal to its own process, if that is rank 1, at some step of training."""

    calls, signal, at = 0, signal.SIGINT, 3

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        self.calls += self.training
        if os.environ.get("RANK") == "1" and self.calls == self.at and self.training:
            os.kill(os.getpid(), self.signal)
        return super().forward(*inputs, **options)


class Killed(Struck):
    signal = signal.SIGKILL


class Broken(Struck):
    """Gives states that are not numbers, on rank 1, in the second epoch."""

    at = 8

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        states = SASRec.forward(self, *inputs, **options)
        self.calls += self.training
        broken = os.environ.get("RANK") == "1" and self.calls >= self.at
        return states * torch.nan if broken else states


LOSSES = {
    "coverage": ScalableCrossEntropy(bucket_size_y=7),
    "paper's rule": ScalableCrossEntropy.paper(bucket_size_y=7, bucket_size_x=3),
}


def run(
    out: Path | None, data: Path, name: str = "coverage", kind: type[SASRec] = SASRec, **changes: Any
) -> dict[str, Any]:
    """Train with 5 sequences a batch, so that the last step has batches that are empty."""
    dataset = PreparedDataset.load(data)
    model = kind(dataset.n_items, MODEL, dropout=0.2)
    given = {"batch_size": 5, "shard_catalogue": True} | changes
    result = train(dataset, LOSSES[name], model=model, out=out, **given)
    found = {"test": result.test, "loss": [record["loss"] for record in result.history]}
    weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return found | {"validation": result.validation, "weights": weights}


def as_rank(rank: int, directory: Path, given: Any, changes: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    try:
        found: Any = run(directory / "run", *given, **changes)
    except (TrainingInterrupted, InputError, RankError) as error:
        found = f"{type(error).__name__}: {error}"
    (directory / str(rank)).write_text(json.dumps(found))


def by_ranks(size: int, directory: Path, *given: Any, **changes: Any) -> list[Any]:
    directory.mkdir(exist_ok=True)
    assert run_launched(size, as_rank, directory, given, changes) == [0] * size
    return [json.loads((directory / str(rank)).read_text()) for rank in range(size)]


def files(directory: Path) -> dict[str, Any]:
    """What training left, without the times."""
    place = directory / "run"
    state = json.loads((place / "resume" / "latest.json").read_text())["state"]
    kept = sorted((place / "resume" / state).glob("table-*.safetensors"))
    best, about = read_tensors(place / "best.safetensors")
    return {
        "state": [state, [file.read_bytes() for file in kept]],
        "best": {name: tensor.tolist() for name, tensor in best.items()} | about,
        "ranks": (place / "test_ranks.npy").read_bytes(),
    }


@needs_gloo
@pytest.mark.parametrize("name", ["coverage", "paper's rule"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_give_what_one_process_accumulates(
    size: int, name: str, tmp_path: Path, data: Path
) -> None:
    (alone,) = by_ranks(1, tmp_path / "alone", data, name, accumulate=size)
    assert by_ranks(size, tmp_path / "ranks", data, name) == size * [alone]
    assert files(tmp_path / "ranks") == files(tmp_path / "alone")


@needs_gloo
def test_ranks_that_accumulate_as_well(tmp_path: Path, data: Path) -> None:
    (alone,) = by_ranks(1, tmp_path / "alone", data, accumulate=4)
    assert by_ranks(2, tmp_path / "ranks", data, accumulate=4) == 2 * [alone]
