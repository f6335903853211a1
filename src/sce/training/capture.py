"""A step of training captured in a CUDA graph: launched at once, instead of kernel by kernel.

A small transformer on a GPU spends most of a step waiting for the host to launch hundreds of small
kernels. Captured once, they are launched as one. A captured step must not depend on values nor
contain a sync: batches have a fixed shape, and losses are given `max_targets`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# Steps run eagerly before the first is captured: kernels compile, libraries and the optimizer
# make their buffers. Another shape compiles kernels of its own, no more.
_WARM_UP = 3
_WARM_UP_AGAIN = 1

T = TypeVar("T")
_Kind = tuple[torch.Size, bool, int | None]


class StepResult(NamedTuple):
    """Loss and statistics of a step, on the device, not yet waited for."""

    loss: Tensor  # scalar
    statistics: Tensor | None  # one number for each of the loss's `statistics`


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    result: StepResult


class CapturedSteps:
    """Runs a step eagerly a few times, then captures it, then replays it.

    Each shape of batch has a graph of its own, another with statistics, and others for other values
    of `max_targets`. They are replayed one after another and hand on nothing but weights, so that
    all use the same memory: that of the one with most targets, after which the others are captured
    once more. Seeding one of the generators, or the GPU's default one, seeds the replay.
    """

    def __init__(
        self,
        step: Callable[[tuple[Tensor, ...], bool, int | None], StepResult],
        device: torch.device,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._step, self._device, self._generators = step, device, generators
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._calls: dict[_Kind, int] = {}
        self._graphs: dict[_Kind, _Graph] = {}

    def __call__(
        self, inputs: tuple[Tensor, ...], with_statistics: bool, max_targets: int | None = None
    ) -> StepResult:
        """Do a step, and return its loss and statistics, on the device."""
        kind = inputs[0].shape, with_statistics, max_targets
        captured = self._graphs.get(kind)
        if captured is None:
            calls = self._calls[kind] = self._calls.get(kind, 0) + 1
            if calls <= (_WARM_UP_AGAIN if self._graphs else _WARM_UP):
                return self.on_capture_stream(
                    lambda: self._step(inputs, with_statistics, max_targets)
                )
            captured = self._capture(inputs, with_statistics, max_targets)
            self._graphs[kind] = captured
        for held, given in zip(captured.inputs, inputs, strict=True):
            held.copy_(given)
        captured.graph.replay()
        loss, statistics = captured.result
        return StepResult(loss.clone(), None if statistics is None else statistics.clone())

    def on_capture_stream(self, work: Callable[[], T]) -> T:
        """Run a step, or anything, eagerly on the stream that the graphs were captured on."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            found = work()
        current.wait_stream(self._stream)
        return found

    def _capture(
        self, given: tuple[Tensor, ...], with_statistics: bool, max_targets: int | None
    ) -> _Graph:
        if max_targets is not None and all(max_targets > (kind[2] or 0) for kind in self._graphs):
            # The blocks of smaller graphs have no room for it, while they would fit into its own.
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()
        inputs = tuple(each.clone() for each in given)
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = self._step(inputs, with_statistics, max_targets)
        return _Graph(graph, inputs, result)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of eager steps: cuBLAS and the allocator keep memory for each stream."""
    return torch.cuda.Stream(device)
