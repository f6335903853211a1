"""The oracle itself, against numbers worked out by hand."""

import math

import torch

from tests.losses.reference import reference_scalable_cross_entropy


def test_two_buckets_by_hand() -> None:
    states = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 9.0]])
    catalogue = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    targets = torch.tensor([2, 1, -100])
    centres = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    # Bucket 0: state 0 with items 0 and 2, of which 2 is its target: {logit 1} and {2}.
    # Bucket 1: state 1 (state 2 is ignored) with items 1 and 2; 1 is its target: {1} and {1}.
    expected = [math.log(math.e + math.e**2) - 1, math.log(2), 0.0]
    found = reference_scalable_cross_entropy(
        states, catalogue, targets, centres, bucket_size_x=1, bucket_size_y=2, reduction="none"
    )
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    mean = reference_scalable_cross_entropy(
        states, catalogue, targets, centres, bucket_size_x=1, bucket_size_y=2
    )
    torch.testing.assert_close(mean.item(), sum(expected) / 2)
