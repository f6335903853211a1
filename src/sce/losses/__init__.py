"""Losses over large catalogues, all called `loss(states, catalogue, targets)`.

They know nothing of padding ids or models: states are [..., d], the catalogue is [items, d], and
padding is a target equal to `ignore_index`. They import torch and nothing else.
"""

from sce.losses.base import BatchShape as BatchShape
from sce.losses.base import DataSummary as DataSummary
from sce.losses.base import Loss as Loss
from sce.losses.base import LossMemory as LossMemory
from sce.losses.base import LossSettings as LossSettings
from sce.losses.buckets import BucketStatistics as BucketStatistics
from sce.losses.buckets import suggest_sizes as suggest_sizes
from sce.losses.full import CrossEntropy as CrossEntropy
from sce.losses.graphed import GraphedLoss as GraphedLoss
from sce.losses.negatives import InBatchNegatives as InBatchNegatives
from sce.losses.negatives import MixedNegatives as MixedNegatives
from sce.losses.negatives import PopularityNegatives as PopularityNegatives
from sce.losses.negatives import UniformNegatives as UniformNegatives
from sce.losses.reduced import ReducedCrossEntropy as ReducedCrossEntropy
from sce.losses.registry import DEFAULT_LOSS as DEFAULT_LOSS
from sce.losses.registry import LOSSES as LOSSES
from sce.losses.registry import LossEntry as LossEntry
from sce.losses.sampled import BinaryCrossEntropy as BinaryCrossEntropy
from sce.losses.sampled import GeneralizedBinaryCrossEntropy as GeneralizedBinaryCrossEntropy
from sce.losses.sampled import SampledCrossEntropy as SampledCrossEntropy
from sce.losses.sampled import SampledLoss as SampledLoss
from sce.losses.scalable import ScalableCrossEntropy as ScalableCrossEntropy
