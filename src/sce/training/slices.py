"""A step of several batches: one for each rank, or all of them in turn in one process.

The loss is that of all their targets, and gradients are added up in the order of the batches: R
ranks and one process that accumulates R batches give the same bits.
"""

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sce.distributed.ranks import Ranks, add_in_order
from sce.losses import Loss, ScalableCrossEntropy
from sce.training.capture import StepResult
from sce.training.step import StepSeeds, TrainingStep


def seeds_of_slice(seeds: StepSeeds, number: int) -> StepSeeds:
    """Derive the seeds of one of the batches of a step."""
    state = np.random.SeedSequence([*seeds, number]).generate_state(2, np.uint64)
    return StepSeeds(*(int(seed) >> 1 for seed in state))


class SlicedStep(TrainingStep):
    """Called with the rows of a step, of which each slice of `batch_size` is a batch.

    Args:
        given: As for `TrainingStep`.
        ranks: The processes; each has a replica of the model.
        slices: Number of batches; with several ranks, as many.
        row_wise: The catalogue, if its gradient is sparse.
        options: As for `TrainingStep`.
    """

    def __init__(
        self,
        *given: Any,
        ranks: Ranks,
        slices: int,
        row_wise: torch.nn.Parameter | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*given, **options)
        self.ranks, self.slices, self.table = ranks, slices, row_wise
        self.own = [ranks.rank] if ranks.size > 1 else list(range(slices))
        self.dense = [p for p in self.parameters if p is not row_wise]
        self.is_mean = getattr(self.loss, "reduction", "mean") == "mean"
        self.by_placed = isinstance(self.loss, ScalableCrossEntropy) and not self.loss.coverage
        if isinstance(self.loss, Loss):
            self.loss = copy.copy(self.loss)
            self.loss.reduction = "sum"

    def __call__(
        self, rows: Tensor, seeds: StepSeeds, *, with_statistics: bool = False
    ) -> StepResult:
        """Train on the sequences `rows` (on the host), the same on every rank."""
        slices = [*rows.split(self.batch_size)]
        slices += [rows[:0]] * (self.slices - len(slices))
        counts = [int(self._lengths(part).sum()) for part in slices]
        if self.by_placed and self.is_mean:
            counts = self._count_placed(slices, seeds)
        over = max(1, sum(counts)) if self.is_mean else 1
        self.optimizer.zero_grad(set_to_none=True)
        totals, statistics, parts = [], None, []
        for number in self.own:
            total = torch.zeros((), device=self.device)
            if len(slices[number]):
                total, found = self._total(slices[number], seeds, number, with_statistics)
                statistics = found if number == 0 else statistics
                (total / over).backward()
            totals.append(total.detach())
            parts.append(self._take_rows())
        self._add_up(parts)
        every = self.ranks.gather(torch.stack(totals), [1] * self.ranks.size)
        self._update()
        return StepResult(add_in_order(every) / over, statistics)

    def _total(
        self, rows: Tensor, seeds: StepSeeds, number: int, with_statistics: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The sum of the losses of a batch, and its statistics."""
        self._seed(seeds_of_slice(seeds, number))
        most = self._max_targets(rows, captured=False)
        total, statistics = self._forward(self.batch(rows), with_statistics, most)
        if not isinstance(self.loss, Loss):  # which gives a mean
            total = total * int(self._lengths(rows).sum())
        return total, statistics

    def _count_placed(self, slices: list[Tensor], seeds: StepSeeds) -> list[int]:
        """The states of each batch that are in any bucket: known after a pass over all of them."""
        placed = self.statistics.index("placed")
        own = []
        for number in self.own:
            share = torch.zeros(1)
            if len(slices[number]):
                found = self._total(slices[number], seeds, number, with_statistics=True)[1]
                assert found is not None
                share = found[placed]
            own.append(round(float(share) * int(self._lengths(slices[number]).sum())))
        return [n for each in self.ranks.gather_counts(*own) for n in each]

    def _take_rows(self) -> tuple[Tensor, Tensor] | None:
        """Take the gradient of the catalogue's rows, each row once."""
        if self.table is None:
            return None
        grad, self.table.grad = self.table.grad, None
        if grad is None:
            return torch.empty(0, dtype=torch.int64, device=self.device), self.table.detach()[:0]
        grad = grad.coalesce()
        return grad.indices()[0], grad.values()

    def _add_up(self, parts: list[tuple[Tensor, Tensor] | None]) -> None:
        """Give all parameters the sums of their gradients, in the order of slices."""
        for weight in self.dense:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        self.ranks.sum_gradients(self.dense)
        rows = [part for part in parts if part is not None]
        if self.table is not None:
            indices, values = (torch.cat(each) for each in zip(*rows, strict=True))
            counts = [n for (n,) in self.ranks.gather_counts(len(indices))]
            indices, values = (self.ranks.gather(each, counts) for each in (indices, values))
            self.table.grad = torch.sparse_coo_tensor(
                indices.unsqueeze(0), values, self.table.shape, check_invariants=False
            )
