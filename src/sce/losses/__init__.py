"""Losses over large catalogues, all called `loss(states, catalogue, targets)`.

They know nothing of padding ids or models: states are [..., d], the catalogue is [items, d], and
padding is a target equal to `ignore_index`. They import torch and nothing else.
"""

from sce.losses.base import BatchShape, DataSummary, Loss, LossMemory, LossSettings
from sce.losses.buckets import BucketStatistics, suggest_sizes
from sce.losses.full import CrossEntropy
from sce.losses.negatives import (
    InBatchNegatives,
    MixedNegatives,
    PopularityNegatives,
    UniformNegatives,
)
from sce.losses.reduced import ReducedCrossEntropy
from sce.losses.registry import DEFAULT_LOSS, LOSSES, LossEntry
from sce.losses.sampled import (
    BinaryCrossEntropy,
    GeneralizedBinaryCrossEntropy,
    SampledCrossEntropy,
    SampledLoss,
)
from sce.losses.scalable import ScalableCrossEntropy, scalable_cross_entropy

__all__ = [
    "DEFAULT_LOSS",
    "LOSSES",
    "BatchShape",
    "BinaryCrossEntropy",
    "BucketStatistics",
    "CrossEntropy",
    "DataSummary",
    "GeneralizedBinaryCrossEntropy",
    "InBatchNegatives",
    "Loss",
    "LossEntry",
    "LossMemory",
    "LossSettings",
    "MixedNegatives",
    "PopularityNegatives",
    "ReducedCrossEntropy",
    "SampledCrossEntropy",
    "SampledLoss",
    "ScalableCrossEntropy",
    "UniformNegatives",
    "scalable_cross_entropy",
    "suggest_sizes",
]
