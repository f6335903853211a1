"""Cross-entropy inside given buckets, in plain PyTorch and bounded memory, with its gradient.

The forward pass keeps, for each state, the largest loss over its buckets and which bucket that was;
the backward pass computes the logits of these pairs again. A loss is kept as the difference of a
log-sum-exp and the positive logit, since of large logits the sum itself would be rounded.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sce.losses.buckets import Buckets, Members, bucket_of_places, group_by_bucket
from sce.losses.gradients import CatalogueGradient
from sce.losses.inputs import apply, compute_dtype, once, rounded

MAX_LOGITS = 1 << 22  # held at once, and as many numbers of gathered rows (16 MiB in float32)


def bucketed_cross_entropy(
    states: Tensor,  # [v, d], the valid states only
    catalogue: Tensor,  # [c, d]
    targets: Tensor,  # [v]
    buckets: Buckets,
    sparse: bool = False,
    autocast_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each state's largest loss over its buckets [v], and which states were placed [v].

    The loss of a state in a bucket is logsumexp({its target} ∪ {the bucket's other items}) minus
    the logit of its target; in no bucket it is 0. On a tie the gradient flows through the lowest
    bucket. With `sparse`, the catalogue's gradient is a coalesced sparse tensor. Factors of
    products are rounded to `autocast_dtype`; sums and gradients are not.
    """
    given = (states, catalogue, targets, buckets, sparse, autocast_dtype)
    losses, winners = apply(_BucketedCrossEntropy, *given)
    return losses, winners >= 0


class _Factors(NamedTuple):
    """States and catalogue, whose rows are rounded where they are multiplied."""

    states: Tensor  # [v, d]
    catalogue: Tensor  # [c, d]
    autocast_dtype: torch.dtype | None

    dtype: torch.dtype  # that is computed in

    def x(self, rows: Tensor | slice) -> Tensor:
        return rounded(self.states[rows], self.autocast_dtype).to(self.dtype)

    def y(self, items: Tensor) -> Tensor:
        rows = self.catalogue.index_select(0, items.flatten()).unflatten(0, items.shape)
        return rounded(rows, self.autocast_dtype).to(self.dtype)


class _BucketedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        buckets: Buckets,
        sparse: bool,
        autocast_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(states, catalogue)
        factors = _Factors(states, catalogue, autocast_dtype, dtype)
        with torch.autocast(states.device.type, enabled=False):
            positive_logits = _positive_logits(factors, targets)
            losses = _losses(factors, targets, positive_logits, buckets)
            largest, winners = _winners(losses, buckets.members, len(states))
        largest = torch.where(winners >= 0, largest, 0.0)
        ctx.sparse, ctx.autocast_dtype = sparse, autocast_dtype
        kept = (states, catalogue, targets, buckets.items, positive_logits, largest, winners)
        ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(winners)
        return largest, winners

    @staticmethod
    @once
    def backward(ctx: Any, grad_losses: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Push the gradient of each state's loss through the bucket that won, and no other."""
        saved = ctx.saved_tensors  # asked for once: gradient checkpointing allows no more
        states, catalogue, targets, bucket_items, positive_logits, largest, winners = saved
        d, dtype = states.shape[1], positive_logits.dtype
        factors = _Factors(states, catalogue, ctx.autocast_dtype, dtype)
        grad_losses = grad_losses.to(dtype)
        grad_states = torch.zeros_like(states, memory_format=torch.contiguous_format)
        accumulator = None
        if ctx.needs_input_grad[1]:
            touched = [targets, *bucket_items]
            accumulator = CatalogueGradient(catalogue, touched, dtype, sparse=ctx.sparse)
        n_buckets, size_y = bucket_items.shape
        won = group_by_bucket(winners.where(winners >= 0, n_buckets), n_buckets)
        with torch.autocast(states.device.type, enabled=False):
            for buckets, places, present in _tiles(won, size_y, d):
                rows = won.states[places]
                x = factors.x(rows)  # [g, r, d]
                scale = torch.where(present, grad_losses[rows], 0.0)  # [g, r]
                # Filling has logits of a bucket that its loss is not of: none may overflow.
                loss = largest[rows].masked_fill(~present, torch.inf)
                # Of the positive logit: its probability less one.
                positive_grad = (torch.expm1(-loss) * scale).unsqueeze(2)
                grad_x = positive_grad * factors.y(targets[rows])
                if accumulator is not None:
                    accumulator.add(targets[rows][present], (positive_grad * x)[present])
                step = _at_once(rows.shape[1], size_y, d, MAX_LOGITS // len(rows))[0]
                for items in bucket_items[buckets].split(step, dim=1):
                    y = factors.y(items)
                    logits = _negative_logits(x, y, targets[rows], items)
                    logits = logits.sub_(positive_logits[rows].unsqueeze(1)).sub_(loss.unsqueeze(1))
                    weights = logits.exp_().mul_(scale.unsqueeze(1))
                    grad_x += weights.mT @ y
                    if accumulator is not None:
                        accumulator.add(items.flatten(), (weights @ x).flatten(0, 1))
                    del y, logits, weights
                # Each state is written once, so the order of the writes does not matter.
                grad_states[rows[present]] = grad_x[present].to(states.dtype)
            grad_catalogue = None if accumulator is None else accumulator.finish()
        return grad_states, grad_catalogue, *[None] * 4


def _positive_logits(factors: _Factors, targets: Tensor) -> Tensor:
    """Return the logit of each state with its target: [v]."""
    step = max(1, MAX_LOGITS // factors.states.shape[1])
    parts = [slice(start, start + step) for start in range(0, max(1, len(targets)), step)]
    return torch.cat([(factors.x(part) * factors.y(targets[part])).sum(dim=1) for part in parts])


def _losses(
    factors: _Factors, targets: Tensor, positive_logits: Tensor, buckets: Buckets
) -> Tensor:
    """Return the loss of every state in every bucket of its own: [p]."""
    members, size_y, d = buckets.members, buckets.items.shape[1], factors.states.shape[1]
    losses = positive_logits.new_zeros(members.states.shape)
    for numbers, places, present in _tiles(members, size_y, d):
        rows = members.states[places]
        x = factors.x(rows)
        # Of the target alone it is 0; the negatives come on top.
        loss = positive_logits.new_zeros(rows.shape)
        step = _at_once(rows.shape[1], size_y, d, MAX_LOGITS // len(rows))[0]
        for items in buckets.items[numbers].split(step, dim=1):
            logits = _negative_logits(x, factors.y(items), targets[rows], items)
            loss = torch.logaddexp(loss, _consume_logsumexp(logits, above=positive_logits[rows]))
            del logits
        losses[places[present]] = loss[present]
    return losses


def _consume_logsumexp(logits: Tensor, *, above: Tensor) -> Tensor:
    """Return how far the log-sum-exp over the items, dimension 1, is above a logit, in place.

    The logarithm is added to a difference of logits, which is exact, not to a large number.
    """
    largest = logits.amax(dim=1)
    shift = torch.where(largest == -torch.inf, 0.0, largest)  # nothing but -inf: the sum is 0
    return logits.sub_(shift.unsqueeze(1)).exp_().sum(dim=1).log_().add_(shift - above)


def _negative_logits(
    x: Tensor,  # [g, r, d]
    y: Tensor,  # [g, y, d]
    targets: Tensor,  # [g, r]
    items: Tensor,  # [g, y] ascending
) -> Tensor:
    """Return the logits [g, y, r] of the items of g buckets with its rows, -inf at targets.

    Items come first: on ARM, torch prepares long for each product with a transposed factor.
    """
    logits = y @ x.mT.contiguous()
    column = torch.searchsorted(items.contiguous(), targets.contiguous())
    column = column.clamp_(max=items.shape[1] - 1)
    hit = items.gather(1, column) == targets
    column = column.unsqueeze(1)
    kept = logits.gather(1, column).masked_fill_(hit.unsqueeze(1), -torch.inf)
    return logits.scatter_(1, column, kept)


def _winners(losses: Tensor, members: Members, n_states: int) -> tuple[Tensor, Tensor]:
    """Return each state's largest loss, and the lowest bucket that has it (-1: in no bucket)."""
    n_buckets, states = len(members.offsets) - 1, members.states
    largest = losses.new_full((n_states,), -torch.inf)
    largest.scatter_reduce_(0, states, losses, reduce="amax")
    # `not less` rather than `equal`: NaN is nobody's equal, and its row must win, not vanish.
    wins = (losses < largest[states]).logical_not_()
    lowest = torch.full((n_states,), n_buckets, device=losses.device)
    bucket = torch.where(wins, bucket_of_places(members), n_buckets)
    lowest.scatter_reduce_(0, states, bucket, reduce="amin")
    return largest, torch.where(lowest == n_buckets, -1, lowest)


def _tiles(members: Members, size_y: int, d: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Cut the list of states into tiles: buckets [g], places [g, r], and which are present [g, r].

    Buckets with similar numbers of states share a tile; one with very many is cut.
    """
    offsets = members.offsets.long()
    most = max(1, MAX_LOGITS // d)
    pieces = (offsets.diff() + most - 1) // most
    buckets = torch.repeat_interleave(pieces)
    before = (pieces.cumsum(0) - pieces)[buckets]
    number = torch.arange(len(buckets), device=offsets.device) - before
    first = offsets[buckets] + number * most
    counts = (offsets[buckets + 1] - first).clamp_(max=most)
    order = counts.argsort(stable=True, descending=True)
    widths = counts[order].tolist()
    tiles: list[tuple[Tensor, Tensor, Tensor]] = []
    start = 0
    while start < len(widths):
        _, group = _at_once(widths[start], size_y, d, MAX_LOGITS)
        some = order[start : start + group]
        column = torch.arange(widths[start], device=offsets.device)
        present = column < counts[some].unsqueeze(1)
        places = (first[some].unsqueeze(1) + column).clamp_(max=len(members.states) - 1)
        tiles.append((buckets[some], places, present))
        start += group
    return tiles


def _at_once(size_x: int, size_y: int, d: int, most: int) -> tuple[int, int]:
    """Return how many items of a bucket fit a chunk, and how many buckets of so many items."""
    size_y = max(1, min(size_y, most // max(1, size_x, d)))
    return size_y, max(1, most // max(1, size_x * size_y, size_x * d, size_y * d))
