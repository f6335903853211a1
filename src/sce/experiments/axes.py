"""What is measured, as axes and as words."""

import math
from collections.abc import Sequence
from itertools import pairwise

from sce.report.scales import Axis, Scale
from sce.units import (
    show_compact,
    show_digits,
    show_duration,
    show_memory,
    show_metric,
)

_METRICS = {"ndcg": "NDCG", "hr": "HR", "mrr": "MRR", "cov": "COV"}
_COSTS = {
    "memory": "peak training memory",
    "time": "training time",
    "speed": "training speed",
}
_UNITS = {
    "k": 1e3,
    "M": 1e6,
    "B": 1e9,
    "T": 1e12,
    "%": 1e-2,
}  # what may stand after a tick's number
_WIDE = 4.0  # times the smallest: a logarithmic axis from here on
_SMALLEST_DOT, _LARGEST_DOT = 2.0, 8.0  # radius


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
    if name == "speed":
        return Axis(f"{name_measure(name)}, tokens per second", show_compact, show_digits, log=log)
    return Axis(name_measure(name), show_digits, show_metric, log=log)


def name_measure(value: str) -> str:
    """What is measured, as people say it."""
    if value in _COSTS:
        return _COSTS[value]
    split, _, metric = value.partition(".")
    kind, _, depth = metric.partition("@")
    return f"{split} {_METRICS.get(kind, kind)}" + (f"@{depth}" if depth else "")


def dot_radius(memory: float | None, largest: float) -> float:
    """Of a dot whose area is in proportion to memory, but for the smallest, which must be seen."""
    if memory is None or largest <= 0:
        return _LARGEST_DOT / 2
    return max(_SMALLEST_DOT, _LARGEST_DOT * math.sqrt(memory / largest))


def label_ticks(scale: Scale) -> list[str]:
    """The ticks of an axis as text: as its axis shows them, or in as many digits as they need.

    >>> label_ticks(Scale(Axis("MiB"), 416, 417, 0, 1, (416, 416.5, 417)))
    ['416.0', '416.5', '417.0']
    """
    shown = [scale.axis.show(value) for value in scale.ticks]
    gaps = [b - a for a, b in pairwise(scale.ticks)]
    if scale.axis.log or not gaps:
        return shown
    slack = min(gaps) / 100
    if all(abs(_read(t) - v) < slack for t, v in zip(shown, scale.ticks, strict=True)):
        return shown
    unit = max(shown, key=lambda text: _UNITS.get(text[-1:], 1.0))[-1:]
    unit = unit if unit in _UNITS else ""
    size = _UNITS.get(unit, 1.0)
    for places in range(12):
        labels = [f"{value / size:,.{places}f}{unit}" for value in scale.ticks]
        if all(abs(_read(t) - v) < slack for t, v in zip(labels, scale.ticks, strict=True)):
            return labels
    return shown


def _read(label: str) -> float:
    """The number that a tick's text stands for."""
    number = label.replace(",", "")
    if number[-1:] in _UNITS:
        return float(number[:-1]) * _UNITS[number[-1]]
    return float(number)
