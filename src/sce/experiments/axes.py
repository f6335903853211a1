"""What is measured, as axes and as words."""

import math
from collections.abc import Sequence

from sce.report.formatting import (
    show_compact,
    show_digits,
    show_duration,
    show_memory,
    show_metric,
)
from sce.report.scales import Axis

_METRICS = {"ndcg": "NDCG", "hr": "HR", "mrr": "MRR", "cov": "COV"}
_WIDE = 4.0  # times the smallest: a logarithmic axis from here on


def is_wide(values: Sequence[float]) -> bool:
    """Whether a logarithmic axis shows them better."""
    real = [value for value in values if value > 0]
    return bool(real) and max(real) > _WIDE * min(real)


def cost_axis(cost: str, *, log: bool) -> Axis:
    """Of memory or time."""
    if cost == "memory":
        return Axis("peak training memory, MiB", show_compact, show_memory, log=log)
    return Axis("training time, seconds", show_compact, show_duration, log=log)


def value_axis(name: str, *, log: bool) -> Axis:
    """Of whatever is measured."""
    if name in ("memory", "time"):
        return cost_axis(name, log=log)
    return Axis(name_measure(name), show_digits, show_metric, log=log)


def name_measure(value: str) -> str:
    """What is measured, as people say it."""
    if value in ("memory", "time"):
        return {"memory": "peak training memory", "time": "training time"}[value]
    split, _, metric = value.partition(".")
    kind, _, depth = metric.partition("@")
    return f"{split} {_METRICS.get(kind, kind)}" + (f"@{depth}" if depth else "")


def dot_radius(memory: float | None, all_: Sequence[float]) -> float:
    """Larger for more memory: the area grows with its logarithm."""
    low, high = min(all_, default=1.0), max(all_, default=1.0)
    if memory is None or high <= low:
        return 4.0
    return 2.5 + 5.5 * math.log(memory / low) / math.log(high / low)
