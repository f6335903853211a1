"""The losses of the steps: kept on the device, and looked at on the host only now and then."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sce.errors import InputError
from sce.training.capture import StepResult
from sce.training.checkpoint import EpochSoFar

LOOK_EVERY = 50  # steps: at most so many are done on broken weights


class DivergenceError(InputError):
    """The loss stopped being a number."""

    def __init__(self, message: str, *, epoch: int, step: int, rows: Sequence[int]) -> None:
        super().__init__(message)
        self.epoch, self.step, self.rows = epoch, step, rows


class _Unseen(NamedTuple):
    step: int
    rows: Tensor
    targets: int


class LossWatch:
    """Collects the results of steps; `look` adds them to the epoch's sums, or raises."""

    def __init__(
        self,
        so_far: EpochSoFar,
        *,
        epoch: int,
        device: torch.device,
        explain: Callable[[str, Sequence[int]], str],
    ) -> None:
        self.so_far, self.epoch, self._explain = so_far, epoch, explain
        self.last = math.nan  # the latest loss that was looked at
        self._losses = torch.zeros(LOOK_EVERY, device=device)
        self._statistics: list[Tensor] = []
        self._unseen: list[_Unseen] = []

    @property
    def full(self) -> bool:
        """Whether nothing more can be added before a look."""
        return len(self._unseen) == LOOK_EVERY

    def add(self, result: StepResult, step: int, rows: Tensor, targets: int) -> None:
        """Take the result of a step (counted from 1), without waiting for it."""
        self._losses[len(self._unseen)].copy_(result.loss, non_blocking=True)
        self._unseen.append(_Unseen(step, rows, targets))
        if result.statistics is not None:
            self._statistics.append(result.statistics)

    def look(self) -> None:
        """Wait for the steps so far, and count them.

        Raises:
            DivergenceError: At the first loss that is not finite.
        """
        losses = self._losses[: len(self._unseen)].tolist()
        for loss, unseen in zip(losses, self._unseen, strict=True):
            if not math.isfinite(loss):
                rows: list[int] = unseen.rows.tolist()
                what = f"the loss became {loss} at step {unseen.step} of epoch {self.epoch}"
                raise DivergenceError(
                    self._explain(what, rows), epoch=self.epoch, step=unseen.step, rows=rows
                )
            self.so_far.loss_sum += loss * unseen.targets
            self.so_far.targets += unseen.targets
            self.so_far.step = unseen.step
            self.last = loss
        for found in self._statistics:
            self.so_far.bucket_samples += 1
            sums = zip(self.so_far.bucket_sums, found.tolist(), strict=True)
            self.so_far.bucket_sums = [total + value for total, value in sums]
        self._unseen.clear()
        self._statistics.clear()
