"""Train next-item recommenders on huge catalogs: Scalable Cross-Entropy and all around it.

The public names. Each is imported from its own module when it is first used, so that `import sce`
costs nothing, and nobody who wants a loss needs polars.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sce.data.batches import PADDING
    from sce.data.filtering import keep_active
    from sce.data.interactions import read_interactions
    from sce.data.prepared import PreparedDataset
    from sce.data.splitting import split_leave_one_out, split_temporal
    from sce.errors import InputError
    from sce.evaluation.evaluate import evaluate
    from sce.losses import (
        BinaryCrossEntropy,
        CrossEntropy,
        GeneralizedBinaryCrossEntropy,
        SampledCrossEntropy,
        ScalableCrossEntropy,
        scalable_cross_entropy,
    )
    from sce.models.sasrec import SASRec, SASRecSettings
    from sce.optim import RowwiseAdagrad
    from sce.recommend import Recommender
    from sce.training.fit import TrainingSettings, fit

__all__ = [
    "PADDING",
    "BinaryCrossEntropy",
    "CrossEntropy",
    "GeneralizedBinaryCrossEntropy",
    "InputError",
    "PreparedDataset",
    "Recommender",
    "RowwiseAdagrad",
    "SASRec",
    "SASRecSettings",
    "SampledCrossEntropy",
    "ScalableCrossEntropy",
    "TrainingSettings",
    "__version__",
    "evaluate",
    "fit",
    "keep_active",
    "read_interactions",
    "scalable_cross_entropy",
    "split_leave_one_out",
    "split_temporal",
]

_HOMES = {
    "sce.data.batches": ["PADDING"],
    "sce.data.filtering": ["keep_active"],
    "sce.data.interactions": ["read_interactions"],
    "sce.data.prepared": ["PreparedDataset"],
    "sce.data.splitting": ["split_leave_one_out", "split_temporal"],
    "sce.errors": ["InputError"],
    "sce.evaluation.evaluate": ["evaluate"],
    "sce.losses": [
        "BinaryCrossEntropy",
        "CrossEntropy",
        "GeneralizedBinaryCrossEntropy",
        "SampledCrossEntropy",
        "ScalableCrossEntropy",
        "scalable_cross_entropy",
    ],
    "sce.models.sasrec": ["SASRec", "SASRecSettings"],
    "sce.optim": ["RowwiseAdagrad"],
    "sce.recommend": ["Recommender"],
    "sce.training.fit": ["TrainingSettings", "fit"],
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'sce' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
