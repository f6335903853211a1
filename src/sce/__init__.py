"""Train next-item recommenders on huge catalogues: Scalable Cross-Entropy and all around it.

Each public name is imported from its module when it is first used, so that `import sce` is light,
and nobody who wants a loss needs polars.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # read by type checkers and editors, and, as text, below
    from sce.data.batches import PADDING as PADDING
    from sce.data.filtering import keep_active as keep_active
    from sce.data.prepare import PrepareOptions as PrepareOptions
    from sce.data.prepare import prepare as prepare
    from sce.data.prepared import PreparedDataset as PreparedDataset
    from sce.data.reading import read_interactions as read_interactions
    from sce.data.splitting import split_leave_one_out as split_leave_one_out
    from sce.data.splitting import split_temporal as split_temporal
    from sce.errors import InputError as InputError
    from sce.evaluation.evaluate import evaluate as evaluate
    from sce.losses import BinaryCrossEntropy as BinaryCrossEntropy
    from sce.losses import CrossEntropy as CrossEntropy
    from sce.losses import GeneralizedBinaryCrossEntropy as GeneralizedBinaryCrossEntropy
    from sce.losses import GraphedLoss as GraphedLoss
    from sce.losses import ReducedCrossEntropy as ReducedCrossEntropy
    from sce.losses import SampledCrossEntropy as SampledCrossEntropy
    from sce.losses import ScalableCrossEntropy as ScalableCrossEntropy
    from sce.models.bert4rec import BERT4Rec as BERT4Rec
    from sce.models.bert4rec import BERT4RecSettings as BERT4RecSettings
    from sce.models.gru4rec import GRU4Rec as GRU4Rec
    from sce.models.gru4rec import GRU4RecSettings as GRU4RecSettings
    from sce.models.ligr import LiGR as LiGR
    from sce.models.ligr import LiGRSettings as LiGRSettings
    from sce.models.sasrec import SASRec as SASRec
    from sce.models.sasrec import SASRecSettings as SASRecSettings
    from sce.optim import RowwiseAdagrad as RowwiseAdagrad
    from sce.recommend import Recommender as Recommender
    from sce.training.fit import fit as fit
    from sce.training.settings import TrainingSettings as TrainingSettings
    from sce.training.start import unite_items as unite_items

__version__ = "0.2.0"

_IMPORT = re.compile(r"^    from (sce\S*) import (\w+) as", re.MULTILINE)
_MODULES = {name: module for module, name in _IMPORT.findall(Path(__file__).read_text("utf-8"))}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from sce.errors import needing

        with needing("prepare", f"sce.{name}"):
            return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'sce' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
