"""Scalable Cross-Entropy over a sharded table: the loss of one process, to the bit.

A rank draws its own centres; its buckets take its own states, and items of the whole catalogue. The
rows of these items are fetched, and the loss computed on them as on a small catalogue, in the order
of ids: renumbering changes nothing of what is computed.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from sce.distributed.nearest import NearestItems
from sce.distributed.ranks import add_in_order
from sce.distributed.table import Rows, ShardedTable, Wanted
from sce.errors import InputError, checked
from sce.evaluation.ranking import key_items
from sce.losses import ScalableCrossEntropy, buckets, inputs

_IGNORED = -100


class ShardedCrossEntropy(nn.Module):
    """Scalable Cross-Entropy whose items lie on all ranks.

    The mean is over the states of all ranks. Its value is that of all, and `backward` gives each
    rank the gradients of its own states; `ShardedTable.send_gradients` and `Ranks.sum_gradients`
    add up the others.

    Args:
        loss: The loss in one process; its `reduction` is "mean".
        table: The item embeddings.
        candidates: As of `NearestItems`.
    """

    @checked
    def __init__(
        self, loss: ScalableCrossEntropy, table: ShardedTable, candidates: int | None = None
    ) -> None:
        super().__init__()
        if loss.reduction != "mean":
            raise InputError(f"a loss over ranks is a mean; got reduction {loss.reduction!r}")
        self.loss, self.table = copy.copy(loss), table
        self.loss.sparse_grad = True  # sizes are those of a loss that touches few rows
        self.nearest = NearestItems(table, loss.backend, candidates)
        self._local = copy.copy(loss)  # on the rows that were fetched, all of them touched
        self._local.reduction, self._local.sparse_grad = "sum", False
        self._local.ignore_index = _IGNORED

    def look_up(self, ids: Tensor, targets: Tensor, *, max_targets: int | None = None) -> Rows:
        """Look up rows as `ShardedTable.look_up` does; a loss of these targets need not ask."""
        wanted = self.table.want(ids, padded=True, note=self._note(targets, max_targets))
        return replace(self.table.fetch(wanted), told=wanted.notes)

    def expect(self, ids: Tensor, targets: Tensor, *, max_targets: int | None = None) -> None:
        """Say what is looked up after the next loss, which then is no sync: the very tensors."""
        self.table.expect(ids, self._note(targets, max_targets))

    def _note(self, targets: Tensor, max_targets: int | None) -> Tensor:
        """Return the number of centres of a batch."""
        inputs.check_tensor("targets", targets)
        n_buckets, *_ = self._sizes(targets, max_targets)
        return (targets != self.loss.ignore_index).any() * n_buckets

    def forward(self, states: Tensor, rows: Rows, targets: Tensor, **options: Any) -> Tensor:
        """Return the loss over all ranks, which call it together; the arguments are of `total`."""
        total, placed = self.total(states, rows, targets, **options)
        return self._mean(total, targets.new_zeros(()) if placed is None else placed)

    def total(
        self,
        states: Tensor,
        rows: Rows,
        targets: Tensor,
        *,
        generator: Generator | None = None,
        max_targets: int | None = None,
        centres: Tensor | None = None,
        count: Callable[[buckets.Buckets, Tensor], Any] = buckets.count_placed,
    ) -> tuple[Tensor, Any]:
        """Return the sum of the losses of this rank alone; all ranks call it together.

        And what `count` finds in its buckets, by default the states in any; None without targets.

        Args:
            states: Hidden states [..., d] of this rank.
            rows: The rows that the states were computed from.
            targets: Ids [...] of the items, or `ignore_index`.
            generator: Draws the centres; ranks want different ones.
            max_targets: As of `ScalableCrossEntropy`.
            centres: In place of random ones [n_buckets, d], for this rank.
            count: Of buckets and targets.
        """
        if not isinstance(rows, Rows):
            raise InputError(f"rows are what `look_up` found; got {type(rows).__name__}")
        likeness = self.table.shard.new_empty(1, self.table.dim)  # the shard may be empty
        inputs.check_arguments(states, likeness, targets)
        if centres is not None:
            inputs.check_centres(centres, likeness)
        valid = targets != self.loss.ignore_index
        dtype = inputs.active_autocast_dtype(states, rows.values)
        n_buckets, size_x, size_y = self._sizes(targets, max_targets)
        self._local.bucket_size_x = size_x or None
        some = targets.numel()
        if centres is None:
            seen = states.detach().reshape(-1, self.table.dim)
            if self.loss.centres != "random":  # which follow from no state
                seen = seen[valid.flatten()]
                some = len(seen)
            seen = inputs.rounded(seen, dtype)
            centres = buckets.draw_centres(seen, n_buckets, self.loss.centres, generator=generator)
            centres = buckets.round_centres(centres, dtype or self.table.shard.dtype)
        elif self.loss.coverage:
            centres = buckets.of_length_one(centres)
        centres = centres[: None if some else 0]
        counts = self._counts(len(centres), rows)
        centres = centres[: counts[self.table.ranks.rank]]
        items, wanted = self._nearest(centres, counts, size_y, dtype, targets, rows)
        catalogue = self._fetch(wanted, rows)
        if not len(centres):
            return states.flatten()[:0].sum().float(), None
        places = catalogue.places(targets).where(valid, _IGNORED), centres, catalogue.places(items)
        return self._local.in_buckets(states, catalogue.values, *places, count=count)

    def _sizes(self, targets: Tensor, max_targets: int | None) -> tuple[int, int, int]:
        if max_targets is not None:
            max_targets = inputs.check_size("max_targets", max_targets)
        most, on_cpu = max_targets or max(1, targets.numel()), targets.device.type == "cpu"
        return self.loss.sizes(self.table.n_items, most, cpu=on_cpu)

    def _counts(self, here: int, rows: Rows) -> list[int]:
        """Return the number of centres of each rank."""
        if rows.told is None:
            return [n for (n,) in self.table.ranks.gather_counts(here)]
        if (own := rows.told[self.table.ranks.rank]) not in (0, here):
            what = f"the rows were looked up for {own} centres, and there are {here}"
            raise InputError(f"{what}: give the same targets and max_targets")
        return rows.told

    def _nearest(
        self,
        centres: Tensor,
        counts: list[int],
        k: int,
        dtype: torch.dtype | None,
        targets: Tensor,
        rows: Rows,
    ) -> tuple[Tensor, Wanted]:
        """Return the items nearest to centres; which of them and of targets are not in rows."""

        def want(items: Tensor, note: int | Tensor = 0) -> Wanted:
            ids = items.flatten()
            if len(ids):
                valid = targets != self.loss.ignore_index
                ids = torch.cat([ids, targets.flatten().where(valid.flatten(), ids[0])])
            return self.table.want(ids, besides=rows.ids, note=note)

        keys, failed = self.nearest.guess(centres, counts, k, dtype)
        likely = key_items(keys).masked_fill(failed.unsqueeze(1), 0)  # too few may have come
        wanted = want(likely, failed.sum())
        items = self.nearest.settle(centres, keys, failed, wanted.notes, dtype)
        return items, want(items) if any(wanted.notes) else wanted

    def _fetch(self, wanted: Wanted, rows: Rows) -> Rows:
        """Return the rows, and those that are wanted beside them."""
        more = self.table.fetch(wanted)
        if more.values.requires_grad:
            self.table.sort_places()  # now that all are known
        both, order = torch.cat([rows.ids, more.ids]).sort()
        return Rows(both, torch.cat([rows.values, more.values]).index_select(0, order))

    def _mean(self, total: Tensor, placed: Tensor) -> Tensor:
        """Add up the losses of all ranks, in rank order, over the states placed of all."""
        ranks = self.table.ranks
        own = torch.stack([total.detach().double(), placed.double()])
        totals, counts = ranks.gather(own.unsqueeze(0), [1] * ranks.size).unbind(1)
        every = [each.to(total.dtype) for each in totals]
        every[ranks.rank] = total  # of which there is a gradient
        return add_in_order(torch.stack(every)) / counts.sum().clamp(min=1).to(total.dtype)
