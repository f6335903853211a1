"""What fell into the buckets, in numbers: what the paper plots over training."""

from typing import NamedTuple

import torch
from torch import Tensor

from sce.losses.buckets import Buckets

_SORTED = 1 << 18  # items of buckets at once: some ten megabytes


class BucketStatistics(NamedTuple):
    """What the paper plots over training, as scalar tensors between 0 and 1."""

    picked_once: Tensor  # share of the valid states that are in exactly one bucket
    placed: Tensor  # share of the valid states that are in any bucket
    correct_in_bucket: Tensor  # share of bucket rows whose own target is among the bucket's items


def count_buckets(buckets: Buckets, targets: Tensor, placed: Tensor) -> BucketStatistics:
    """Count over the states [n], of which those with a negative target do not count."""
    valid = targets >= 0
    chosen = buckets.states.long()
    wanted = targets.long()[chosen]
    picks = torch.zeros(len(targets), device=targets.device, dtype=torch.int64)
    picks.scatter_add_(0, chosen.flatten(), (wanted >= 0).long().flatten())
    correct = torch.zeros((), device=targets.device, dtype=torch.int64)
    at_once = max(1, _SORTED // max(1, buckets.items.shape[1]))
    for items, own in zip(buckets.items.split(at_once), wanted.split(at_once), strict=True):
        items = items.long().sort(dim=1).values
        column = torch.searchsorted(items, own).clamp_(max=items.shape[1] - 1)
        correct += (items.gather(1, column) == own).sum()
    states, rows = valid.sum().clamp(min=1), (wanted >= 0).sum().clamp(min=1)
    return BucketStatistics(
        picked_once=(picks == 1).sum() / states,
        placed=placed.sum() / states,
        correct_in_bucket=correct / rows,
    )
