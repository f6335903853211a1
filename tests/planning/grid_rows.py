"""Rows of `benchmarks/plan_grid.py`."""

from typing import Any

from sce.planning import Job


def job_of(row: dict[str, Any]) -> Job:
    """Say what was trained: one sequence of the whole length, all others of a share of it."""
    others = ("loss", "part", "mean_share")
    names = [name for name in Job.__dataclass_fields__ if name in row and name not in others]
    padded = max(1, round(row["length"] * row["mean_share"]))
    mean = (row["length"] + (row["batch"] - 1) * padded) / row["batch"]
    return Job(**{name: row[name] for name in names}, mean_length=mean)
