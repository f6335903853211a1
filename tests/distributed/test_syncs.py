"""How often a step waits for the device: once for each size that the host must know."""

import sys
from collections import Counter
from pathlib import Path
from threading import Barrier, Thread, get_ident
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sce.distributed
from sce import ScalableCrossEntropy
from sce.training.shards import ShardedStep
from tests.cycle_data import make_cycle, train
from tests.distributed.test_bytes import ThreadRanks, take_step

aten: Any = torch.ops.aten
SIZES = {op.default for op in (aten.nonzero, aten._unique2, aten.unique_consecutive, aten.bincount)}
HOST = {aten._local_scalar_dense.default, aten.masked_select.default}
FOLDER = sce.distributed.__path__[0]


class Syncs(TorchDispatchMode):
    """Counts operations of this thread, by the module that waits for them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()
        self.counts = False

    def __enter__(self) -> Any:
        self.counts = True
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *given: Any) -> None:
        self.counts = False
        super().__exit__(*given)  # type: ignore[no-untyped-call]

    def count(self) -> None:
        frame: Any = sys._getframe()
        while frame is not None and "/sce/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename.startswith(FOLDER):
            self.found[frame.f_code.co_name] += 1

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = args[1] if op is aten.index.Tensor else ()
        masked = any(index is not None and index.dtype is torch.bool for index in indices)
        if masked or op in SIZES | HOST:
            self.count()
        return op(*args, **(kwargs or {}))


EXPECTED = {
    # Split sizes of two look-ups: with the first the centres of each rank, with the second the
    # buckets whose certificate fails.
    "want": 2,
    "get": 1,  # rows with a gradient: counted before the loss, asked for after its gradient
}


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> Syncs:
    found, really, here = Syncs(), Tensor.tolist, get_ident()

    def tolist(self: Tensor) -> Any:
        if get_ident() == here and found.counts:
            found.count()
        return really(self)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    return found


def test_a_step_waits_for_sizes_alone(syncs: Syncs) -> None:
    slots: list[tuple[Tensor, ...]] = [()] * 2
    barrier = Barrier(2, timeout=60)
    other = Thread(target=take_step, args=(ThreadRanks(1, slots, barrier),))
    other.start()
    with syncs:
        take_step(ThreadRanks(0, slots, barrier))
    other.join()
    assert syncs.found == EXPECTED


def test_a_step_of_training_waits_once_for_sizes(
    syncs: Syncs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, steps = ShardedStep._move_slices, 4

    def move(self: ShardedStep, *given: Any) -> Any:
        with syncs:
            return really(self, *given)

    monkeypatch.setattr(ShardedStep, "_move_slices", move)
    dataset = make_cycle(tmp_path, items=31)
    loss: Any = ScalableCrossEntropy(bucket_size_y=7)
    train(dataset, loss, batch_size=5, max_steps=steps, shard_catalogue=True)
    # The sizes of a first look-up come with those of the second one of the step before.
    assert syncs.found == {"want": steps + 1, "get": steps}
