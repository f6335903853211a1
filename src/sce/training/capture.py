"""A step of training as one CUDA graph: launched at once, instead of kernel by kernel.

A small transformer on a GPU spends most of a step waiting for the host to launch hundreds of small
kernels. Recorded once, they are launched as one. What is recorded must not depend on values, nor
make the host wait: batches have a fixed shape, and the losses that take valid positions out (which
counts them on the host) run as they are.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# Steps run as they are before one is recorded: kernels compile, libraries and the optimizer make
# their buffers.
_WARM_UP = 3

T = TypeVar("T")


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    histories: Tensor
    targets: Tensor
    loss: Tensor


class CapturedSteps:
    """Runs `step(histories, targets)` as it is a few times, then records it, then replays it.

    Each shape of batch has a recording of its own. They are replayed one after another and hand
    nothing on to each other but weights, so that all use the same memory.

    Args:
        step: From histories and targets to the loss; moves the weights.
        device: Where all of it is.
        generators: What random numbers come from, besides the default generator of the GPU.
            Seeding one before a call seeds the replay.
    """

    def __init__(
        self,
        step: Callable[[Tensor, Tensor], Tensor],
        device: torch.device,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._step = step
        self._device = device
        self._generators = generators
        self._side = _side_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._calls: dict[torch.Size, int] = {}
        self._recordings: dict[torch.Size, _Recording] = {}

    def __call__(self, histories: Tensor, targets: Tensor) -> Tensor:
        """Do a step, and return its loss, on the device."""
        shape = histories.shape
        recording = self._recordings.get(shape)
        if recording is None:
            self._calls[shape] = self._calls.get(shape, 0) + 1
            if self._calls[shape] <= _WARM_UP:
                return self.aside(lambda: self._step(histories, targets))
            recording = self._recordings[shape] = self._record(histories, targets)
        recording.histories.copy_(histories)
        recording.targets.copy_(targets)
        recording.graph.replay()
        return recording.loss.clone()

    def aside(self, step: Callable[[], T]) -> T:
        """Run a step as it is, on a stream other than the default, as the recordings were."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            found = step()
        current.wait_stream(self._side)
        return found

    def _record(self, histories: Tensor, targets: Tensor) -> _Recording:
        inputs = histories.clone(), targets.clone()
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side):
            loss = self._step(*inputs)
        return _Recording(graph, *inputs, loss)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that steps run on while they are not replayed: one for all.

    cuBLAS keeps a workspace for each stream, of 32 MiB on an H200 and as much again for the thread
    of the backward pass, and the allocator keeps free blocks for each.
    """
    return torch.cuda.Stream(device)
