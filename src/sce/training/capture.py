"""A step of training as one CUDA graph: launched at once, instead of kernel by kernel.

A small transformer on a GPU spends most of a step waiting for the host to launch hundreds of small
kernels. Recorded once, they are launched as one. What is recorded must not depend on values, nor
make the host wait: batches have a fixed shape, and losses that take valid positions out are told
how much room to make for them.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# Steps run as they are before the first is recorded: kernels compile, libraries and the optimizer
# make their buffers. Another shape compiles kernels of its own, no more.
_WARM_UP = 3
_WARM_UP_AGAIN = 1

T = TypeVar("T")
_Kind = tuple[torch.Size, bool, int | None]


class StepResult(NamedTuple):
    """On the device, not yet waited for."""

    loss: Tensor  # scalar
    statistics: Tensor | None  # [3]: picked once, placed, correct in bucket


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    histories: Tensor
    targets: Tensor
    result: StepResult


class CapturedSteps:
    """Runs a step as it is a few times, then records it, then replays it.

    Each shape of batch has a recording of its own, another with statistics, and others for more or
    less room. They are replayed one after another and hand on nothing but weights, so that all use
    the same memory.

    Args:
        step: From histories, targets, whether statistics are wanted, and the room for valid
            positions; moves the weights.
        device: Where all of it is.
        generators: What random numbers come from, besides the default generator of the GPU.
            Seeding one before a call seeds the replay.
    """

    def __init__(
        self,
        step: Callable[[Tensor, Tensor, bool, int | None], StepResult],
        device: torch.device,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._step = step
        self._device = device
        self._generators = generators
        self._side = _side_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._calls: dict[_Kind, int] = {}
        self._recordings: dict[_Kind, _Recording] = {}

    def __call__(
        self, histories: Tensor, targets: Tensor, with_statistics: bool, room: int | None = None
    ) -> StepResult:
        """Do a step, and return its loss and statistics, on the device."""
        kind = histories.shape, with_statistics, room
        recording = self._recordings.get(kind)
        if recording is None:
            calls = self._calls[kind] = self._calls.get(kind, 0) + 1
            if calls <= (_WARM_UP_AGAIN if self._recordings else _WARM_UP):
                return self.aside(lambda: self._step(histories, targets, with_statistics, room))
            recording = self._record(histories, targets, with_statistics, room)
            self._recordings[kind] = recording
        recording.histories.copy_(histories)
        recording.targets.copy_(targets)
        recording.graph.replay()
        loss, statistics = recording.result
        return StepResult(loss.clone(), None if statistics is None else statistics.clone())

    def aside(self, work: Callable[[], T]) -> T:
        """Run a step, or anything, as it is, on the stream that the recordings were made on."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            found = work()
        current.wait_stream(self._side)
        return found

    def _record(
        self, histories: Tensor, targets: Tensor, with_statistics: bool, room: int | None
    ) -> _Recording:
        inputs = histories.clone(), targets.clone()
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side):
            result = self._step(*inputs, with_statistics, room)
        return _Recording(graph, *inputs, result)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that steps run on while they are not replayed: one for all.

    cuBLAS keeps a workspace for each stream, and as much again for the thread of the backward pass,
    and the allocator keeps free blocks for each.
    """
    return torch.cuda.Stream(device)
