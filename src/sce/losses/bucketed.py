"""Cross-entropy inside given buckets, in plain PyTorch and bounded memory (see `tiled.py`)."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from sce.losses.buckets import Buckets, Members, bucket_of_places, group_by_bucket
from sce.losses.tiled import Options, Scorer, Tile, tiled_cross_entropy

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
    given, items = (states, catalogue, None, targets), buckets.items
    n, d, n_buckets = len(buckets.members.states), states.shape[1], len(items)
    with torch.no_grad(), torch.autocast(states.device.type, enabled=False):
        scorer, tiles = Scorer(*given, autocast_dtype), _tiles(n, True, d, *buckets.members, items)
        losses = scorer.losses(scorer.positives(), tiles, n)
        largest, winners = _winners(losses, buckets.members, len(states))
        won = group_by_bucket(winners, n_buckets)
    placed, of_won = winners < n_buckets, partial(_tiles, len(states), False)
    options = Options(sparse, autocast_dtype, torch.where(placed, largest, 0.0))
    return tiled_cross_entropy(*given, of_won, *won, items, options=options), placed


def _winners(losses: Tensor, members: Members, n_states: int) -> tuple[Tensor, Tensor]:
    """Return each state's largest loss, and the lowest bucket that has it; n_buckets: in none."""
    n_buckets, states = len(members.offsets) - 1, members.states
    largest = losses.new_full((n_states,), -torch.inf)
    largest.scatter_reduce_(0, states, losses, reduce="amax")
    # `not less` rather than `equal`: NaN is nobody's equal, and its row must win, not vanish.
    wins = (losses < largest[states]).logical_not_()
    lowest = torch.full((n_states,), n_buckets, device=losses.device)
    bucket = torch.where(wins, bucket_of_places(members), n_buckets)
    return largest, lowest.scatter_reduce_(0, states, bucket, reduce="amin")


def _tiles(
    n: int, by_place: bool, d: int, states: Tensor, offsets: Tensor, all_items: Tensor
) -> Iterator[Tile]:
    """Cut the list of states into tiles: of buckets with similar numbers of states.

    One with very many is cut. Results go to the n states, or to their n places in the list.
    """
    size_y, offsets, most = all_items.shape[1], offsets.long(), max(1, MAX_LOGITS // d)
    pieces = (offsets.diff() + most - 1) // most
    bucket = torch.repeat_interleave(pieces)
    before = (pieces.cumsum(0) - pieces)[bucket]
    first = offsets[bucket] + (torch.arange(len(bucket), device=offsets.device) - before) * most
    counts = (offsets[bucket + 1] - first).clamp_(max=most)
    order = counts.argsort(stable=True, descending=True)
    widths, start = counts[order].tolist(), 0
    while start < len(widths):
        _, group = _at_once(widths[start], size_y, d, MAX_LOGITS)
        some = order[start : start + group]
        column = torch.arange(widths[start], device=offsets.device)
        places = (first[some].unsqueeze(1) + column).clamp_(max=len(states) - 1)
        rows = states[places]
        place = (places if by_place else rows).where(column < counts[some].unsqueeze(1), n)
        step = _at_once(widths[start], size_y, d, MAX_LOGITS // len(rows))[0]
        for items in all_items[bucket[some]].split(step, dim=1):
            yield Tile(rows, items, place, ascending=True)
        start += group


def _at_once(size_x: int, size_y: int, d: int, most: int) -> tuple[int, int]:
    """Return how many items of a bucket fit a chunk, and how many buckets of so many items."""
    size_y = max(1, min(size_y, most // max(1, size_x, d)))
    return size_y, max(1, most // max(1, size_x * size_y, size_x * d, size_y * d))
