"""How much memory training will take, before it is tried: a formula, calibrated by measurement.

job.py says what is trained, formula.py what that takes, coefficients.py holds the fitted numbers,
search.py finds what fits, sizes.py reads and writes amounts of memory.
"""

from sce.planning.formula import Forecast, loss_bytes, predict
from sce.planning.job import LOSSES, Job, LossName
from sce.planning.search import Plan, Planned, largest_batch, plan
from sce.planning.summary import summarize_data
from sce.units import parse_size, show_size

__all__ = [
    "LOSSES",
    "Forecast",
    "Job",
    "LossName",
    "Plan",
    "Planned",
    "largest_batch",
    "loss_bytes",
    "parse_size",
    "plan",
    "predict",
    "show_size",
    "summarize_data",
]
