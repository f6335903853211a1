"""The table of backbones: command line, plan and tests iterate over it."""

from typing import NamedTuple

from sce.models.base import BackboneSettings, ConfiguredBackbone
from sce.models.bert4rec import BERT4Rec
from sce.models.gru4rec import GRU4Rec
from sce.models.hstu import HSTU
from sce.models.ligr import LiGR
from sce.models.sasrec import SASRec


class BackboneEntry(NamedTuple):
    """A backbone that can be trained by its name."""

    backbone: type[ConfiguredBackbone]
    summary: str
    """A few words for `--help`."""

    @property
    def settings(self) -> type[BackboneSettings]:
        """The class of its settings."""
        return self.backbone.settings_class

    @property
    def label(self) -> str:
        """Its name in tables and charts."""
        return self.backbone.__name__


BACKBONES: dict[str, BackboneEntry] = {
    "sasrec": BackboneEntry(SASRec, "causal transformer"),
    "ligr": BackboneEntry(LiGR, "transformer with gated residuals, SwiGLU"),
    "gru4rec": BackboneEntry(GRU4Rec, "recurrent network"),
    "bert4rec": BackboneEntry(BERT4Rec, "transformer both ways, masked items"),
    "hstu": BackboneEntry(HSTU, "pointwise attention, knows times"),
}
DEFAULT_BACKBONE = "sasrec"
