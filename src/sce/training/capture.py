"""A step of training as one CUDA graph: launched at once, instead of kernel by kernel.

A small transformer on a GPU spends most of a step waiting for the host to launch hundreds of small
kernels. Recorded once, they are launched as one. What is recorded must not depend on values, nor
make the host wait: batches have a fixed shape, and the losses that take valid positions out (which
counts them on the host) run as they are.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Steps run as they are before one is recorded: kernels compile, libraries and the optimizer make
# their buffers.
_WARM_UP = 3


class CapturedStep:
    """Runs `step(histories, targets)` as it is a few times, then records it, then replays it.

    Args:
        step: From histories and targets to the loss; moves the weights.
        generators: What random numbers come from, besides the default generator of the GPU.
            Seeding one before a call seeds the replay.
    """

    def __init__(
        self,
        step: Callable[[Tensor, Tensor], Tensor],
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._step = step
        self._generators = generators
        self._side = torch.cuda.Stream()
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, histories: Tensor, targets: Tensor) -> Tensor:
        """Do a step, and return its loss, on the device."""
        if self._graph is None:
            self._calls += 1
            if self._calls <= _WARM_UP:
                return self._aside(histories, targets)
            self._record(histories, targets)
        assert self._graph is not None
        self._histories.copy_(histories)
        self._targets.copy_(targets)
        self._graph.replay()
        return self._loss.clone()

    def _aside(self, histories: Tensor, targets: Tensor) -> Tensor:
        """Run as it is, on a stream other than the default, as the recording will."""
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            loss = self._step(histories, targets)
        torch.cuda.current_stream().wait_stream(self._side)
        return loss

    def _record(self, histories: Tensor, targets: Tensor) -> None:
        self._histories, self._targets = histories.clone(), targets.clone()
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            self._loss = self._step(self._histories, self._targets)
        self._graph = graph
