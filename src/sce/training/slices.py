"""A step of several batches: one for each rank, or all of them in turn in one process.

The loss is that of all their targets, and gradients are added up in the order of the batches: R
ranks and one process that accumulates R batches give the same bits.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sce.data.batches import IGNORED
from sce.distributed.ranks import Ranks, add_in_order
from sce.losses import Loss, ScalableCrossEntropy
from sce.models.base import Backbone
from sce.training.capture import StepResult
from sce.training.device import plain_products
from sce.training.step import StepSeeds, TrainingStep


def seeds_of_slice(seeds: StepSeeds, number: int) -> StepSeeds:
    """Derive the seeds of one of the batches of a step."""
    state = np.random.SeedSequence([*seeds, number]).generate_state(2, np.uint64)
    return StepSeeds(*(int(seed) >> 1 for seed in state))


class SlicedStep(TrainingStep):
    """Called with the rows of a step, of which each slice of `batch_size` is a batch.

    There are `slices` of them, a multiple of the number of ranks; `row_wise` is the catalogue, if
    its gradient is sparse. `between` is called between two batches of this process, with the number
    of those done, the same on every rank; what it raises ends the step, and the weights are as
    before it.
    """

    def __init__(
        self,
        *given: Any,
        ranks: Ranks,
        slices: int,
        row_wise: nn.Parameter | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*given, **options)
        self.ranks, self.slices, self.row_wise = ranks, slices, row_wise
        self.between: Callable[[int], object] = lambda done: None
        self._entries: list[tuple[Tensor, Tensor]] = []  # rows with a gradient
        self.dense = [p for p in self.parameters if p is not row_wise and p.requires_grad]
        self.draws = isinstance(self.model, Backbone) and self.model.draws
        self.is_mean = getattr(self.loss, "reduction", "mean") == "mean"
        self.by_placed = isinstance(self.loss, ScalableCrossEntropy) and not self.loss.coverage
        if isinstance(self.loss, Loss):
            self.loss = copy.copy(self.loss)
            self.loss.reduction = "sum"

    def __call__(
        self, rows: Tensor, seeds: StepSeeds, *, with_statistics: bool = False
    ) -> StepResult:
        """Train on the sequences `rows` (on the host), the same on every rank."""
        with plain_products(self.device, self.precision):
            return self._move_slices(rows, seeds, with_statistics)

    def _move_slices(self, rows: Tensor, seeds: StepSeeds, with_statistics: bool) -> StepResult:
        ranks, slices = self.ranks, [*rows.split(self.batch_size)]
        # One that is empty adds 0.0, which may change the sign of a zero, and more change no bit.
        rounds = -(-min(self.slices, len(slices) + 1) // ranks.size)
        slices += [rows[:0]] * (rounds * ranks.size - len(slices))
        over = 1
        if self.is_mean and self.by_placed:
            over = max(1, self._count_placed(slices, seeds))
        elif self.is_mean:
            over = max(1, sum(self._count(each, seeds, n) for n, each in enumerate(slices)))
        self.optimizer.zero_grad(set_to_none=True)
        totals, statistics = [], None
        sums: list[Tensor] | None = None
        for number in range(ranks.rank, len(slices), ranks.size):
            self.between(number // ranks.size)
            total, found = self._total(slices[number], seeds, number, with_statistics)
            statistics = found if number == 0 else statistics
            if len(slices[number]):
                (total / over).backward()
            totals.append(ranks.gather(total.detach().unsqueeze(0), [1] * ranks.size))
            self._collect_rows()
            sums = ranks.sum_gradients(self.dense, sums)
            self.optimizer.zero_grad(set_to_none=True)
        for weight, total in zip(self.dense, sums or (), strict=True):
            weight.grad = total
        self._send_rows()
        self._update()
        return StepResult(add_in_order(torch.cat(totals)) / over, statistics)

    def _total(
        self, rows: Tensor, seeds: StepSeeds, number: int, with_statistics: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The sum of the losses of a batch, and its statistics."""
        if not len(rows):
            return torch.zeros((), device=self.device), None
        self._seed(seeds_of_slice(seeds, number))
        most = self._max_targets(rows, captured=False)
        total, statistics = self._forward(self.batch(rows), with_statistics, most)
        if self.is_mean and not isinstance(self.loss, Loss):
            total = total * self._count(rows, seeds, number)
        return total, statistics

    def _count(self, rows: Tensor, seeds: StepSeeds, number: int) -> int:
        """The targets of a batch, drawn as they will be."""
        if not (self.draws and len(rows)):
            return int(self.targets(rows).sum())
        self._seed(seeds_of_slice(seeds, number))
        return int((self.draw(self.batch(rows))[0] != IGNORED).sum())

    def _count_placed(self, slices: list[Tensor], seeds: StepSeeds) -> int:
        """The states that are in any bucket: known after a pass over all batches."""
        placed, own = self.statistics.index("placed"), []
        for number in range(self.ranks.rank, len(slices), self.ranks.size):
            self.between(number // self.ranks.size)
            found = self._total(slices[number], seeds, number, with_statistics=True)[1]
            share = 0.0 if found is None else float(found[placed])
            own.append(round(share * self._count(slices[number], seeds, number)))
        return sum(map(sum, self.ranks.gather_counts(*own)))

    def _collect_rows(self) -> None:
        """Keep the gradient of the catalogue's rows, each once for each rank, in their order."""
        if (table := self.row_wise) is None:
            return
        indices, values = torch.empty(0, dtype=torch.int64, device=self.device), table.detach()[:0]
        if table.grad is not None:
            grad = table.grad.coalesce()
            indices, values = grad.indices()[0], grad.values()
        counts = [n for (n,) in self.ranks.gather_counts(len(indices))]
        self._entries.append(
            (self.ranks.gather(indices, counts), self.ranks.gather(values, counts))
        )

    def _send_rows(self) -> None:
        """Give the catalogue the gradient of its rows."""
        if (table := self.row_wise) is None:
            return
        indices, values = (torch.cat(each) for each in zip(*self._entries, strict=True))
        self._entries = []
        table.grad = torch.sparse_coo_tensor(
            indices.unsqueeze(0), values, table.shape, check_invariants=False
        )
