"""Steps recorded as CUDA graphs against the same steps as they are."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sce.data.batches import DeviceSequences
from sce.data.prepared import Sequences
from sce.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    GeneralizedBinaryCrossEntropy,
    PopularityNegatives,
    SampledCrossEntropy,
    ScalableCrossEntropy,
)
from sce.models.registry import BACKBONES, DEFAULT_BACKBONE
from sce.models.sasrec import SASRec, SASRecSettings
from sce.training.capture import CapturedSteps, StepResult
from sce.training.device import same_bits
from sce.training.optimizer import make_optimizer, set_rate, sparse_gradients
from sce.training.settings import TrainingSettings
from sce.training.step import TrainingStep, seeds_of_epoch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

N_ITEMS, USERS, BATCH = 500, 64, 16


def sequences(
    device: torch.device, *, mostly_short: bool = False, times: bool = False
) -> DeviceSequences:
    generator = np.random.default_rng(0)
    lengths = generator.integers(2, 30, USERS)
    if mostly_short:
        lengths[4:] = 3
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    items = generator.integers(N_ITEMS, size=offsets[-1]).astype(np.int32)
    users = np.arange(USERS, dtype=np.int32)
    return DeviceSequences.place(Sequences(items, offsets, users, 999 * items), device, times=times)


def train(
    captured: bool,
    precision: str,
    clip_norm: float | None = None,
    row_wise: bool = False,
    loss: nn.Module | None = None,
    backbone: str = "sasrec",
) -> list[torch.Tensor]:
    device = torch.device("cuda", torch.cuda.current_device())
    shape: Any = BACKBONES[backbone].settings
    model = shape(dim=16, dropout=0.3, max_length=20).build(N_ITEMS).to(device).train()
    settings = TrainingSettings(
        learning_rate=1e-2,
        precision=precision,  # type: ignore[arg-type]
        clip_norm=clip_norm,
        batch_size=BATCH,
        row_wise=row_wise,
        catalogue_learning_rate=1e-2 if row_wise else None,
    )
    optimizer = make_optimizer(
        model.parameters(),
        settings,
        device=device,
        capturable=captured,
        row_wise=model.catalogue if row_wise else None,
    )
    loss = loss or ScalableCrossEntropy(
        n_buckets=8, coverage=False, bucket_size_x=16, bucket_size_y=32
    )
    step = TrainingStep(
        model,
        loss,
        optimizer,
        sequences(device, times=model.uses_times),
        settings,
        device=device,
        max_length=20,
        captured=captured,
    )
    losses, statistics = [], []
    with (
        torch.random.fork_rng(devices=[device.index]),
        sparse_gradients(model, loss, wanted=row_wise),
    ):
        for number, seeds in enumerate(seeds_of_epoch(0, 1, 30)[1]):
            set_rate(optimizer, 1 / (1 + number))
            # Now and then a smaller batch, which runs as it is, and one with statistics.
            size = BATCH - 3 if number % 7 == 6 else BATCH
            rows = torch.arange(size) + number % (USERS - BATCH)
            result = step(rows, seeds, with_statistics=number % 3 == 2)
            losses.append(result.loss)
            if result.statistics is not None:
                statistics.append(result.statistics)
    assert len(statistics) == (10 if isinstance(loss, ScalableCrossEntropy) else 0)
    weights = [parameter.detach().flatten() for parameter in model.parameters()]
    return [torch.stack(losses), *statistics, torch.cat(weights)]


@pytest.mark.parametrize("backbone", sorted(set(BACKBONES) - {DEFAULT_BACKBONE}))
def test_a_recorded_step_of_another_backbone_is_the_step(backbone: str) -> None:
    runs = [train(captured, "float32", backbone=backbone) for captured in (False, True)]
    for eager, recorded in zip(*runs, strict=True):
        torch.testing.assert_close(recorded, eager, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(("clip_norm", "row_wise"), [(None, False), (0.5, False), (None, True)])
def test_a_recorded_step_is_the_step(
    precision: str, clip_norm: float | None, row_wise: bool
) -> None:
    tolerance = 1e-3 if precision == "float32" else 3e-2
    for eager, recorded in zip(
        train(False, precision, clip_norm, row_wise),
        train(True, precision, clip_norm, row_wise),
        strict=True,
    ):
        torch.testing.assert_close(recorded, eager, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(
    "loss",
    [
        CrossEntropy(),
        CrossEntropy(chunk_size=200),
        # The same negatives whatever the room: those of a sequence, of which there are as many.
        SampledCrossEntropy(20),
        SampledCrossEntropy(20, negatives=PopularityNegatives(torch.arange(N_ITEMS))),
        BinaryCrossEntropy(20),
        GeneralizedBinaryCrossEntropy(20),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_losses_that_make_room_for_valid_positions(loss: nn.Module, precision: str) -> None:
    tolerance = 1e-3 if precision == "float32" else 3e-2
    eager, recorded = (train(captured, precision, loss=loss) for captured in (False, True))
    for found, wanted in zip(recorded, eager, strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "loss",
    [
        CrossEntropy(),
        SampledCrossEntropy(20),
        BinaryCrossEntropy(),
        ScalableCrossEntropy(n_buckets=8, coverage=False, bucket_size_x=16, bucket_size_y=32),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_recorded_steps_give_the_same_bits_when_asked_to(loss: nn.Module) -> None:
    with same_bits(torch.device("cuda")):
        first, second = (train(True, "float32", loss=loss) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("captured", [False, True])
def test_all_batches_of_a_size_have_the_same_shape(captured: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = SASRec(N_ITEMS, SASRecSettings(dim=16, max_length=20)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    step = TrainingStep(
        model,
        CrossEntropy(),
        optimizer,
        sequences(device, mostly_short=True),
        TrainingSettings(batch_size=BATCH),
        device=device,
        max_length=20,
        captured=captured,
    )
    for size in (BATCH, BATCH - 3):
        batches = [step.batch(torch.randperm(USERS)[:size]) for _ in range(20)]
        assert len({(batch.histories.shape, batch.length_groups) for batch in batches}) == 1
        assert all(batch.fixed and len(batch.length_groups or ()) > 1 for batch in batches)


def test_graphs_of_several_widths_share_their_memory() -> None:
    big = 64 << 20  # bytes

    def step(inputs: tuple[torch.Tensor, ...], twice: bool, max_targets: int | None) -> StepResult:
        histories, targets = inputs
        assert max_targets is None
        many = torch.ones(big // 4, device="cuda") * histories.sum()
        return StepResult((many.mean() + targets.sum()) * (2 if twice else 1), None)

    steps = CapturedSteps(step, torch.device("cuda", torch.cuda.current_device()))
    batches = [
        (torch.full((4, width), width, device="cuda"), torch.ones(4, width, device="cuda"))
        for width in (3, 8, 5, 6)
    ]
    expected = [4.0 * w * w + 4 * w for w in (3, 8, 5, 6)]
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for batch in batches:
        for twice in 5 * [False, True]:
            steps(batch, twice)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # Two at most are alive at once: the ones, and their product.
    assert torch.cuda.memory_reserved() - before < 3 * big
    # One after another, in any order, each still gives what it gave.
    for _ in range(2):
        found = [[steps(batch, twice).loss for twice in (False, True)] for batch in batches]
        values = [[float(each) for each in pair] for pair in found]
        assert values == [pytest.approx([value, 2 * value], rel=1e-4) for value in expected]
        batches, expected = batches[::-1], expected[::-1]


def test_graphs_of_more_and_more_targets_share_the_memory_of_the_largest() -> None:
    big = 16 << 20  # bytes a target

    def step(inputs: tuple[torch.Tensor, ...], twice: bool, max_targets: int | None) -> StepResult:
        histories, targets = inputs
        assert max_targets is not None
        many = torch.ones(max_targets * big // 4, device="cuda")
        return StepResult(many.mean() * histories.sum() + targets.sum(), None)

    steps = CapturedSteps(step, torch.device("cuda", torch.cuda.current_device()))
    batch = torch.ones(2, 3, device="cuda"), torch.ones(2, 3, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        for bound in (1, 2, 3, 4, 5, 6, 7, 8, 3, 8):
            for _ in range(5):
                assert float(steps(batch, False, bound).loss) == 12
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 10 * big
