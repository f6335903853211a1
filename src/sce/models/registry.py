"""The table of backbones: command line, plan and tests iterate over it."""

from typing import NamedTuple

from sce.models.base import Backbone, BackboneSettings
from sce.models.bert4rec import BERT4Rec, BERT4RecSettings
from sce.models.gru4rec import GRU4Rec, GRU4RecSettings
from sce.models.hstu import HSTU, HSTUSettings
from sce.models.ligr import LiGR, LiGRSettings
from sce.models.sasrec import SASRec, SASRecSettings


class BackboneEntry(NamedTuple):
    """A backbone that can be trained by its name."""

    settings: type[BackboneSettings]
    backbone: type[Backbone]
    label: str
    """Its name in tables and charts."""
    summary: str
    """A few words for `--help`."""


BACKBONES: dict[str, BackboneEntry] = {
    "sasrec": BackboneEntry(SASRecSettings, SASRec, "SASRec", "causal transformer"),
    "ligr": BackboneEntry(LiGRSettings, LiGR, "LiGR", "transformer with gated residuals, SwiGLU"),
    "gru4rec": BackboneEntry(GRU4RecSettings, GRU4Rec, "GRU4Rec", "recurrent network"),
    "bert4rec": BackboneEntry(
        BERT4RecSettings, BERT4Rec, "BERT4Rec", "transformer both ways, masked items"
    ),
    "hstu": BackboneEntry(HSTUSettings, HSTU, "HSTU", "pointwise attention, knows times"),
}
DEFAULT_BACKBONE = "sasrec"
