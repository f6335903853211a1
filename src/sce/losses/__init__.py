"""Losses over large catalogues, all called `loss(states, catalogue, targets)`.

They know nothing of sequences, padding ids or models: states are [..., d], the catalogue is [c, d]
and padding is a target equal to `ignore_index`. They import torch and nothing else.
"""

from sce.losses.buckets import suggest_bucket_size_y, suggest_sizes
from sce.losses.full import CrossEntropy, cross_entropy
from sce.losses.negatives import InBatchNegatives, PopularityNegatives, UniformNegatives
from sce.losses.sampled import (
    BinaryCrossEntropy,
    GeneralizedBinaryCrossEntropy,
    SampledCrossEntropy,
    binary_cross_entropy,
    generalized_binary_cross_entropy,
    sampled_cross_entropy,
)
from sce.losses.scalable import ScalableCrossEntropy, scalable_cross_entropy
from sce.losses.statistics import BucketStatistics

__all__ = [
    "BinaryCrossEntropy",
    "BucketStatistics",
    "CrossEntropy",
    "GeneralizedBinaryCrossEntropy",
    "InBatchNegatives",
    "PopularityNegatives",
    "SampledCrossEntropy",
    "ScalableCrossEntropy",
    "UniformNegatives",
    "binary_cross_entropy",
    "cross_entropy",
    "generalized_binary_cross_entropy",
    "sampled_cross_entropy",
    "scalable_cross_entropy",
    "suggest_bucket_size_y",
    "suggest_sizes",
]
