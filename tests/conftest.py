import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sce.data.prepared import PreparedDataset
from tests.losses.kernels.interpreter import hasten

os.fsync = lambda fd: None  # takes much of the time, and shows in no test
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored behind "&"
# Without a GPU the kernels are tested in Triton's interpreter; it must be told before it is
# imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    hasten()


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation made, but for a given one."""

    numel = 0
    known: int | None = None  # where the data of the given one are

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.data_ptr() != self.known:
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.fixture
def largest_tensor() -> Callable[[], LargestTensor]:
    return LargestTensor


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    from tests.cycle_data import make_cycle  # with kernels: not before the interpreter is told

    return make_cycle(tmp_path_factory.mktemp("data") / "cycle")


@pytest.fixture
def hangup() -> Iterator[None]:
    """Let SIGHUP do what it does, also where nohup has it ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
    torch.rand(7)  # so that seeding with 0 once more does not go unnoticed
