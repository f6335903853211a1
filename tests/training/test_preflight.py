import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import InternalTorchDynamoError

from sce.data.prepared import PreparedDataset
from sce.errors import InputError, settings_as_flags
from sce.losses import (
    BatchShape,
    CrossEntropy,
    DataSummary,
    Loss,
    LossMemory,
    SampledCrossEntropy,
    ScalableCrossEntropy,
)
from sce.models.sasrec import SASRec
from sce.training import preflight as module
from sce.training.preflight import explained_errors, preflight
from sce.training.settings import TrainingSettings
from tests.cycle_data import lay_out, make_cycle

GIB = 2**30
MODEL = SASRec(9, dim=4)
LARGE = DataSummary(1_000_000, 128, 200.0, torch.zeros(1))


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    data = make_cycle(tmp_path / "data")

    def tell(
        loss: object,
        summary: DataSummary = LARGE,
        *,
        model: nn.Module = MODEL,
        histories: Sequence[Sequence[int]] = 200 * [[1, 2, 3]],
        free: int | None = 100 * GIB,
        max_length: int = 200,
    ) -> list[str]:
        monkeypatch.setattr(module, "free_memory", lambda _: free)
        fields = vars(data) | {"train": lay_out(histories, range(len(histories)))}
        return list(
            preflight(
                model,
                loss,
                PreparedDataset(**fields),
                summary,
                TrainingSettings(batch_size=100),
                max_length=max_length,
                device=torch.device("cpu"),
            )
        )

    return tell


def gives(memory: LossMemory | None, kind: type = CrossEntropy, **options: Any) -> Loss:
    """A loss that says so of its memory, for a mean batch."""
    loss: Loss = kind(**options)

    def says(shape: BatchShape) -> LossMemory | None:
        assert (shape.n_items, shape.sequences, shape.length) == (1_000_000, 128, 200)
        assert (shape.targets, shape.max_targets, shape.dim) == (25_600, 25_600, 4)
        return memory

    loss.memory = says  # type: ignore[method-assign]
    return loss


def test_a_full_softmax_that_will_not_fit_is_said_with_what_would(said: Any) -> None:
    (line,) = said(gives(LossMemory(forward=200.0 * GIB, backward=300.0 * GIB)))
    assert "about 300.0 GiB (25,600 targets a batch), the model 0.0 GiB" in line
    assert "100.0 GiB are free" in line
    assert "ScalableCrossEntropy(), or chunk_size=131072" in line
    assert 100 * GIB > 131072 * 25_600 * 4


def test_a_full_softmax_over_a_million_items(said: Any) -> None:
    (line,) = said(CrossEntropy())  # as it counts itself
    assert "the logits of this loss will take about 286.1 GiB (25,600 targets a batch)" in line
    assert said(CrossEntropy(chunk_size=1024)) == said(ScalableCrossEntropy()) == []


def test_what_fits_or_is_not_known_is_not_warned_about(said: Any) -> None:
    large = LossMemory(99.0 * GIB, 90.0 * GIB)
    assert said(gives(large)) == []
    assert said(gives(large), free=None) == []
    assert said(gives(None), free=1) == []
    assert said(lambda *_: None, free=1) == []


def test_other_losses_that_will_not_fit(said: Any) -> None:
    large = LossMemory(101.0 * GIB, 0)
    (line,) = said(gives(large, SampledCrossEntropy, n_negatives=9))
    assert line.endswith("what would fit: a smaller batch_size, or ScalableCrossEntropy()")
    (line,) = said(gives(large, ScalableCrossEntropy))
    assert line.endswith("what would fit: a smaller batch_size")


def test_the_model_counts_too(said: Any) -> None:
    with torch.device("meta"):
        model = SASRec(2**26, dim=4)  # 1 GiB, with gradient and moments 4
    (line,) = said(gives(LossMemory(1.0, 1.0)), model=model, free=4 * GIB)
    assert "the model 4.0 GiB" in line


def test_events_that_are_not_trained_on(said: Any) -> None:
    histories = [list(range(9)), [1, 2, 3]] * 50
    (line,) = said(CrossEntropy(), histories=histories, max_length=5, free=None)
    assert "50 training histories are longer than 5 events" in line
    assert "not trained on, 150 of 500 events" in line
    for enough in (7, 8):  # with 7, 50 of 500
        assert said(CrossEntropy(), histories=histories, max_length=enough, free=None) == []


@pytest.mark.parametrize("size", ["auto", 50, 51])
def test_buckets_of_the_whole_catalogue(size: Any, said: Any) -> None:
    few = replace(LARGE, n_items=50)
    (line,) = said(ScalableCrossEntropy(bucket_size_y=size), few)
    assert "every bucket holds all of them, and CrossEntropy() would do the same" in line
    assert said(ScalableCrossEntropy(bucket_size_y=49), few) == []
    assert said(ScalableCrossEntropy()) == []


def test_buckets_beyond_the_batch(said: Any) -> None:
    small = replace(LARGE, sequences=4, mean_length=2.0)
    (line,) = said(ScalableCrossEntropy(coverage=False, bucket_size_x=9, n_buckets=2), small)
    assert "bucket_size_x is 9 and a mean batch has 8 targets" in line
    assert said(ScalableCrossEntropy(coverage=False, bucket_size_x=8, n_buckets=2), small) == []


def explain(error: Exception, loss: nn.Module | None = None) -> str:
    """The sentence that an error of training becomes."""
    with (
        pytest.raises(InputError) as caught,
        explained_errors(MODEL, loss or CrossEntropy(), compiled=True),
    ):
        raise error
    return str(caught.value)


@pytest.mark.parametrize("loss", [CrossEntropy(), ScalableCrossEntropy()])
def test_what_is_said_when_memory_did_run_out(loss: nn.Module) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 GiB. GPU 0 has ...")
    texts = [
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory",
        "[enforce fail at alloc_cpu.cpp:98] data. DefaultCPUAllocator: not enough memory: you "
        "tried to allocate 400000000000000 bytes.",
    ]
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)  # what torch really says
    for one in (error, *map(RuntimeError, texts), MemoryError(), caught.value):
        hint = explain(one, loss)
        assert "memory ran out" in hint
        assert "; try a smaller batch_size" in hint
        assert ("ScalableCrossEntropy()" in hint) == isinstance(loss, CrossEntropy)


def test_what_is_said_when_compiling_failed() -> None:
    hint = explain(InternalTorchDynamoError("no compiler"))
    assert hint == "the model could not be compiled (no compiler); leave out compile"


def test_other_errors_stay_what_they_are() -> None:
    error = RuntimeError("shapes do not match")
    with (
        pytest.raises(RuntimeError) as caught,
        explained_errors(MODEL, CrossEntropy(), compiled=True),
    ):
        raise error
    assert caught.value is error


FULL = LossMemory(101.0 * GIB, 0)


@pytest.mark.parametrize(
    ("say", "in_python", "as_flags"),
    [
        (
            lambda said: said(CrossEntropy(), histories=100 * [list(range(9))], max_length=5)[0],
            "a larger max_length would",
            "a larger --model.max-length would",
        ),
        (
            lambda said: said(ScalableCrossEntropy(), histories=[[1, 2, 3]])[0],
            "a smaller batch_size",
            "a smaller --batch-size",
        ),
        (
            lambda said: said(ScalableCrossEntropy(), replace(LARGE, n_items=5))[0],
            "bucket_size_y is 5 and the catalogue has 5 items: every bucket holds all of them, "
            "and CrossEntropy() would do the same for less",
            "--loss.bucket-size-y is 5 and the catalogue has 5 items: every bucket holds all of "
            "them, and --loss ce would do the same for less",
        ),
        (
            lambda said: said(
                ScalableCrossEntropy(coverage=False, bucket_size_x=9, n_buckets=2),
                replace(LARGE, sequences=4, mean_length=2.0),
            )[0],
            "bucket_size_x is 9 and a mean batch has 8 targets: buckets hold all of them; "
            "consider a larger batch_size or a smaller alpha",
            "--loss.bucket-size-x is 9 and a mean batch has 8 targets: buckets hold all of them; "
            "consider a larger --batch-size or a smaller --loss.alpha",
        ),
        (
            lambda said: said(gives(FULL))[0],
            "fit: ScalableCrossEntropy(), or chunk_size=131072",
            "fit: --loss sce, or --loss.chunk-size 131072",
        ),
        (
            lambda said: said(gives(FULL, SampledCrossEntropy, n_negatives=9))[0],
            "fit: a smaller batch_size, or ScalableCrossEntropy()",
            "fit: a smaller --batch-size, or --loss sce",
        ),
        (
            lambda _: explain(MemoryError()),
            "try a smaller batch_size, or ScalableCrossEntropy()",
            "try a smaller --batch-size, or --loss sce",
        ),
        (
            lambda _: explain(InternalTorchDynamoError("none")),
            "leave out compile",
            "leave out --training.compile",
        ),
    ],
)
def test_settings_are_named_as_the_caller_gives_them(
    say: Any, in_python: str, as_flags: str, said: Any
) -> None:
    text = say(said)
    assert in_python in text
    assert "--" not in text
    with settings_as_flags():
        text = say(said)
    assert as_flags in text
    assert not re.search(r"[a-z]_[a-z]|\w\(\)", text)


class Summed(nn.Module):
    """States that are sums of item vectors: of those up to each event, or of all."""

    def __init__(self, *, causal: bool, noise: float = 0.0) -> None:
        super().__init__()
        self.catalogue = nn.Parameter(torch.randn(9, 4))
        self.causal, self.noise = causal, noise

    def forward(self, histories: torch.Tensor) -> torch.Tensor:
        assert not self.training
        vectors = self.catalogue[histories]
        states = vectors.cumsum(1) if self.causal else vectors.sum(1, keepdim=True) + vectors
        return states + self.noise * torch.randn_like(states)


class Timed(Summed):
    uses_times = True

    def forward(self, histories: torch.Tensor, times: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(histories) + times[:, 1:, None]


def test_a_model_that_sees_the_future(said: Any) -> None:
    model = Summed(causal=False)
    [text] = said(CrossEntropy(chunk_size=1), model=model)
    assert text.startswith("Summed computes states of events before the last otherwise when")
    assert text.endswith("give it a causal mask")
    assert model.training
    assert said(CrossEntropy(chunk_size=1), model=Summed(causal=True)) == []
    assert said(CrossEntropy(chunk_size=1), model=Summed(causal=True, noise=1.0)) == []
    assert text not in said(CrossEntropy(chunk_size=1), model=model, max_length=1)
    assert said(CrossEntropy(chunk_size=1), model=Timed(causal=False)) == [
        text.replace("Summed", "Timed")
    ]
