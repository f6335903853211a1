"""Train next-item recommenders on huge catalogs: Scalable Cross-Entropy and all around it.

The public names. Each is imported from its own module when it is first used, so that `import sce`
costs nothing, and nobody who wants a loss needs polars.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sce.errors import InputError
    from sce.losses import (
        BinaryCrossEntropy,
        CrossEntropy,
        GeneralizedBinaryCrossEntropy,
        SampledCrossEntropy,
        ScalableCrossEntropy,
        scalable_cross_entropy,
    )

__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "GeneralizedBinaryCrossEntropy",
    "InputError",
    "SampledCrossEntropy",
    "ScalableCrossEntropy",
    "__version__",
    "scalable_cross_entropy",
]

_HOMES = {
    "sce.errors": ["InputError"],
    "sce.losses": [
        "BinaryCrossEntropy",
        "CrossEntropy",
        "GeneralizedBinaryCrossEntropy",
        "SampledCrossEntropy",
        "ScalableCrossEntropy",
        "scalable_cross_entropy",
    ],
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'sce' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
