"""Rows of `benchmarks/plan_grid.py`."""

from typing import Any

import numpy as np

from sce.data.parts import shares_longer
from sce.planning import Job


def job_of(row: dict[str, Any]) -> Job:
    """Say what was trained: one sequence of the whole length, all others of a share of it."""
    others = ("loss", "part", "mean_share")
    names = [name for name in Job.__dataclass_fields__ if name in row and name not in others]
    lengths = np.full(row["batch"], max(1, round(row["length"] * row["mean_share"])))
    lengths[0] = row["length"]
    return Job(
        **{name: row[name] for name in names},
        mean_length=float(lengths.mean()),
        longer=tuple(shares_longer(lengths, row["length"])),
        users=row["batch"],
        events=int((lengths + 1).sum()),
    )
