"""Steps recorded as CUDA graphs against the same steps as they are."""

import numpy as np
import pytest
import torch

from sce.data.batches import DeviceSequences
from sce.data.prepared import Sequences
from sce.losses import ScalableCrossEntropy
from sce.models.sasrec import SASRec, SASRecSettings
from sce.training.optimizer import make_optimizer, set_rate
from sce.training.step import TrainingStep, seeds_of_epoch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

N_ITEMS, USERS, BATCH = 500, 64, 16


def sequences(device: torch.device) -> DeviceSequences:
    generator = np.random.default_rng(0)
    lengths = generator.integers(2, 30, USERS)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    items = generator.integers(N_ITEMS, size=offsets[-1]).astype(np.int32)
    users = np.arange(USERS, dtype=np.int32)
    return DeviceSequences.place(Sequences(items, offsets, users), device)


def train(captured: bool, precision: str, clip_norm: float | None) -> list[torch.Tensor]:
    device = torch.device("cuda", torch.cuda.current_device())
    model = SASRec(N_ITEMS, SASRecSettings(dim=16, dropout=0.3, max_length=20)).to(device).train()
    optimizer = make_optimizer(
        model.parameters(),
        learning_rate=1e-2,
        betas=(0.9, 0.98),
        weight_decay=0.0,
        device=device,
        capturable=captured,
    )
    step = TrainingStep(
        model,
        ScalableCrossEntropy(n_buckets=8, bucket_size_x=16, bucket_size_y=32),
        optimizer,
        sequences(device),
        device=device,
        max_length=20,
        precision=precision,  # type: ignore[arg-type]
        clip_norm=clip_norm,
        captured=BATCH if captured else None,
    )
    losses = []
    with torch.random.fork_rng(devices=[device.index]):
        for number, seeds in enumerate(seeds_of_epoch(0, 1, 30)[1]):
            set_rate(optimizer, 1e-2 / (1 + number))
            # Now and then a smaller batch, and one with statistics: both run as they are.
            size = BATCH - 3 if number % 7 == 6 else BATCH
            rows = torch.arange(size) + number % (USERS - BATCH)
            result = step(rows, seeds, with_statistics=number % 10 == 9)
            losses.append(result.loss)
    weights = [parameter.detach().flatten() for parameter in model.parameters()]
    return [torch.stack(losses), torch.cat(weights)]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_recorded_step_is_the_step(precision: str, clip_norm: float | None) -> None:
    tolerance = 1e-3 if precision == "float32" else 3e-2
    for eager, recorded in zip(
        train(False, precision, clip_norm), train(True, precision, clip_norm), strict=True
    ):
        torch.testing.assert_close(recorded, eager, rtol=tolerance, atol=tolerance)
