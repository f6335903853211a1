"""The table of losses: command line, plan, labels and tests iterate over it."""

from typing import NamedTuple

from sce.losses.base import Loss, LossSettings
from sce.losses.full import CrossEntropy, CrossEntropySettings
from sce.losses.reduced import ReducedCrossEntropy, ReducedCrossEntropySettings
from sce.losses.sampled import (
    BCEPlusSettings,
    BCESettings,
    BinaryCrossEntropy,
    GBCESettings,
    GeneralizedBinaryCrossEntropy,
    SampledCrossEntropy,
    SampledCrossEntropySettings,
)
from sce.losses.scalable import ScalableCrossEntropy, ScalableCrossEntropySettings


class LossEntry(NamedTuple):
    """A loss that can be trained with by its name."""

    settings: type[LossSettings]
    loss: type[Loss]
    label: str
    """Its name in tables and charts."""
    summary: str
    """A few words for `--help`."""


LOSSES: dict[str, LossEntry] = {
    "bce": LossEntry(BCESettings, BinaryCrossEntropy, "BCE", "binary, one negative a target"),
    "bce+": LossEntry(BCEPlusSettings, BinaryCrossEntropy, "BCE⁺", "binary, several negatives"),
    "gbce": LossEntry(
        GBCESettings, GeneralizedBinaryCrossEntropy, "gBCE", "binary, calibrated for sampling"
    ),
    "ce-": LossEntry(
        SampledCrossEntropySettings, SampledCrossEntropy, "CE⁻", "softmax over sampled negatives"
    ),
    "ce": LossEntry(CrossEntropySettings, CrossEntropy, "CE", "exact softmax over the catalogue"),
    "sce": LossEntry(
        ScalableCrossEntropySettings, ScalableCrossEntropy, "SCE", "Scalable Cross-Entropy"
    ),
    "rece": LossEntry(
        ReducedCrossEntropySettings, ReducedCrossEntropy, "RECE", "softmax over hashed chunks"
    ),
}
DEFAULT_LOSS = "sce"
