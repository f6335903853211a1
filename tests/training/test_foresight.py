import numpy as np
import pytest
import torch
from torch import nn

from sce.data.batches import DeviceSequences
from sce.errors import InputError
from sce.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    SampledCrossEntropy,
    ScalableCrossEntropy,
)
from sce.training.foresight import explained, foresee, predict_bytes
from sce.training.objective import Workload
from tests.cycle_data import lay_out

GIB = 2**30
LARGE = Workload(1_000_000, sequences=128, mean_length=200.0, counts=np.zeros(1, np.int64))
SEQUENCES = DeviceSequences.place(lay_out([[1, 2, 3]] * 200, range(200)))


def said(loss: object, workload: Workload = LARGE, free: int | None = 100 * GIB) -> list[str]:
    model = nn.Linear(1, 1)
    return list(
        foresee(loss, model, workload, SEQUENCES, batch_size=128, max_length=200, free=free)
    )


def test_the_logits_of_a_full_softmax() -> None:
    logits = 25_600 * 1_000_000 * 4
    assert predict_bytes(CrossEntropy(), LARGE) == pytest.approx(3 * logits, rel=0.02)
    assert predict_bytes(CrossEntropy(chunk_size=1_000_000), LARGE) == pytest.approx(logits, 0.02)
    chunked = predict_bytes(CrossEntropy(chunk_size=1000), LARGE)
    assert chunked == pytest.approx(logits / 1000, rel=0.3)  # the states count as well
    assert predict_bytes(ScalableCrossEntropy(), LARGE) is None
    assert predict_bytes(lambda *_: None, LARGE) is None


def test_a_full_softmax_that_will_not_fit_is_said_with_what_would() -> None:
    (line,) = said(CrossEntropy())
    whole = predict_bytes(CrossEntropy(), LARGE)
    assert whole is not None
    assert f"about {whole / GIB:.1f} GiB (25,600 targets a batch)" in line
    assert "100.0 GiB are free" in line
    assert "--loss sce, or --loss.chunk-size 131072" in line
    chunked = predict_bytes(CrossEntropy(chunk_size=131072), LARGE)
    assert chunked is not None
    assert chunked < 100 * GIB


def test_what_fits_is_not_warned_about() -> None:
    assert said(CrossEntropy(), free=300 * GIB) == []
    assert said(CrossEntropy(), free=None) == []
    assert said(CrossEntropy(chunk_size=4096)) == []
    assert said(ScalableCrossEntropy()) == []
    assert said(BinaryCrossEntropy()) == []


def test_many_negatives() -> None:
    (line,) = said(SampledCrossEntropy(1_000_000))
    assert "a smaller --batch-size, or --loss sce" in line


def test_the_model_counts_too() -> None:
    model = nn.Linear(2**14, 2**14)  # 1 GiB, with gradient and moments 4
    lines = list(
        foresee(
            CrossEntropy(chunk_size=4096),
            model,
            LARGE,
            SEQUENCES,
            batch_size=1,
            max_length=200,
            free=4 * GIB,
        )
    )
    assert "the model 4.0 GiB" in lines[0]


def test_events_that_are_not_trained_on() -> None:
    long = DeviceSequences.place(lay_out([list(range(9)), [1, 2, 3]] * 50, range(100)))

    def said_of(max_length: int) -> list[str]:
        loss, model = ScalableCrossEntropy(), nn.Linear(1, 1)
        return list(
            foresee(loss, model, LARGE, long, batch_size=9, max_length=max_length, free=None)
        )

    (line,) = said_of(5)
    assert "50 training histories are longer than 5 events" in line
    assert "not trained on, 150 of 500 events" in line
    assert said_of(7) == []  # 50 of 500
    assert said_of(8) == []


def test_buckets_of_the_whole_catalogue() -> None:
    few = Workload(50, sequences=128, mean_length=200.0, counts=np.zeros(1, np.int64))
    (line,) = said(ScalableCrossEntropy(bucket_size_y=50), few)
    assert "every bucket holds all of them, and --loss ce would do the same" in line
    assert said(ScalableCrossEntropy(bucket_size_y=49), few) == []


def test_buckets_beyond_the_batch() -> None:
    small = Workload(1000, sequences=4, mean_length=2.0, counts=np.zeros(1, np.int64))
    (line,) = said(ScalableCrossEntropy(bucket_size_x=9, n_buckets=2), small)
    assert "bucket_size_x is 9 and a mean batch has 8 targets" in line
    assert said(ScalableCrossEntropy(bucket_size_x=8, n_buckets=2), small) == []


@pytest.mark.parametrize("loss", [CrossEntropy(), ScalableCrossEntropy()])
def test_what_is_said_when_memory_did_run_out(loss: nn.Module) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 GiB. GPU 0 has ...")
    texts = [
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory",
        "[enforce fail at alloc_cpu.cpp:98] data. DefaultCPUAllocator: not enough memory: you "
        "tried to allocate 400000000000000 bytes.",
    ]
    for one in (error, *map(RuntimeError, texts), MemoryError()):
        hint = explained(one, loss, compiled=False)
        assert isinstance(hint, InputError)
        assert "; try a smaller --batch-size" in str(hint)
        assert ("--loss sce" in str(hint)) == isinstance(loss, CrossEntropy)


def test_what_torch_really_says_when_memory_runs_out() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert "memory ran out" in str(explained(caught.value, CrossEntropy(), compiled=False))


def test_what_is_said_when_compiling_failed() -> None:
    from torch._dynamo.exc import InternalTorchDynamoError

    error = InternalTorchDynamoError("no compiler")
    hint = explained(error, CrossEntropy(), compiled=True)
    assert str(hint) == "the model could not be compiled (no compiler); leave out compile"


def test_other_errors_stay_what_they_are() -> None:
    error = RuntimeError("shapes do not match")
    assert explained(error, CrossEntropy(), compiled=True) is error
