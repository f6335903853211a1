"""Training by processes that are launched as torchrun's are, of which one may be hurt."""

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
from sce.data.prepared import PreparedDataset
from sce.errors import InputError, RankError
from sce.losses import CrossEntropy, ScalableCrossEntropy
from sce.models.sasrec import SASRec
from sce.training import shards
from sce.training.signals import TrainingInterrupted
from tests.cycle_data import MODEL, train
from tests.distributed.pool import run_launched

needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)
ITEMS = 31


class Struck(SASRec):
    """Sends a signal to its own process, if that is rank 1 at its first attempt, at some step."""

    calls, signal, phase, at = 0, signal.SIGINT, True, 3

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        first, now = (
            os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0",
            self.training == self.phase,
        )
        self.calls += now
        if first and os.environ.get("RANK") == "1" and now and self.calls == self.at:
            os.kill(os.getpid(), self.signal)
        return super().forward(*inputs, **options)


class StruckLate(Struck):
    """Is sent the signal in the evaluation of an epoch."""

    phase, at = False, 2


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


class Normed(SASRec):
    """Has running statistics, which each rank has of its own batches."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.norm = torch.nn.BatchNorm1d(self.settings.dim)

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        states = super().forward(*inputs, **options)
        normed: Tensor = self.norm(states.transpose(1, 2))
        return normed.transpose(1, 2)


class Crowded(Struck):
    """The disk of rank 0 is full when it is to write the best weights."""

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get("RANK") == "0":
            shards.write_tensors = refuse  # type: ignore[assignment, attr-defined]
        return SASRec.forward(self, *inputs, **options)


def refuse(*_: Any) -> None:
    raise InputError("cannot write best.safetensors: no space left on device")


def plain(states: Tensor, catalogue: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(
        (states @ catalogue.T).flatten(0, 1), targets.flatten(), ignore_index=-100
    )


# Losses and settings.
TRAININGS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "replicated": (CrossEntropy(), {"clip_norm": 0.5}),
    "paper's rule": (ScalableCrossEntropy.paper(bucket_size_y=7, bucket_size_x=3), {}),
    "row-wise": (ScalableCrossEntropy(bucket_size_y=7), {"row_wise": True}),
    "a function": (plain, {}),
    "a sum": (CrossEntropy(reduction="sum"), {}),
}
for like, sharded in (("row-wise", "sharded"), ("paper's rule", "sharded, paper's rule")):
    TRAININGS[sharded] = TRAININGS[like][0], {"shard_catalogue": True}


def run(
    out: Path | None, data: Path, name: str, kind: type[SASRec] = SASRec, **changes: Any
) -> dict[str, Any]:
    """Train with 5 sequences a batch, so that the last step has batches that are empty."""
    dataset, (loss, others) = PreparedDataset.load(data), TRAININGS[name]
    model = kind(dataset.n_items, MODEL, dropout=0.2)
    given = {"batch_size": 5, **others, **changes}
    result = train(dataset, loss, model=model, out=out, **given)
    found = {"test": result.test, "loss": [record["loss"] for record in result.history]}
    weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return found | {"validation": result.validation, "weights": weights}


def as_rank(rank: int, directory: Path, given: Any, changes: dict[str, Any]) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int("resume" in changes))
    torch.set_num_threads(1)
    try:
        found: Any = run(directory / "run", *given, **changes)
    except (TrainingInterrupted, InputError, RankError) as error:
        found = f"{type(error).__name__}: {error}"
    (directory / str(rank)).write_text(json.dumps(found))


def by_ranks(size: int, directory: Path, *given: Any, **changes: Any) -> list[Any]:
    """Call `run` on so many ranks: what each has found, or why it ended."""
    directory.mkdir(exist_ok=True)
    assert run_launched(size, as_rank, directory, given, changes) == [0] * size
    return [json.loads((directory / str(rank)).read_text()) for rank in range(size)]


def command(rank: int, directory: Path, data: Path, attempt: int, *flags: str) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    options = ["--epochs", "1", "--device", "cpu", "--model.dim", "8", *flags]
    file = (directory / f"{rank}.txt").open("w")
    with file, redirect_stdout(file), redirect_stderr(file):
        code = main(["train", str(data), "--out", str(directory / "run"), *options])
    sys.exit(code)
