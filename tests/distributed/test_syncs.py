"""How often a step waits for the device: once for each size that the host must know."""

import sys
from collections import Counter
from threading import Barrier, Thread, get_ident
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sce.distributed
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


def test_a_step_waits_for_sizes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    slots: list[tuple[Tensor, ...]] = [()] * 2
    barrier, syncs = Barrier(2, timeout=60), Syncs()
    really, here = Tensor.tolist, get_ident()

    def tolist(self: Tensor) -> Any:
        if get_ident() == here:
            syncs.count()
        return really(self)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    other = Thread(target=take_step, args=(ThreadRanks(1, slots, barrier),))
    other.start()
    with syncs:
        take_step(ThreadRanks(0, slots, barrier))
    other.join()
    assert syncs.found == {
        # Split sizes of two look-ups: with the first the centres of each rank, with the second the
        # buckets whose certificate fails.
        "want": 2,
        "get": 1,  # rows with a gradient: counted before the loss, asked for after its gradient
    }
