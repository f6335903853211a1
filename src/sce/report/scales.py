"""Axes of a figure: from values to places on the page, with ticks at round numbers."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sce.units import is_number, show_compact

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Axis:
    """What an axis says and how it is divided."""

    label: str
    """What is measured, with its unit."""
    show: Callable[[float], str] = show_compact
    """A value as text, short, for the ticks."""
    show_exactly: Callable[[float], str] | None = None
    """A value as text for the box under the pointer, if more can be said there."""
    from_zero: bool = False
    """Begin at 0, so that heights compare as values do."""
    up_to: float | None = None
    """Reach at least this far."""
    whole: bool = False
    """Divide at whole numbers only."""
    log: bool = False
    """Equal steps are equal factors; values must be positive."""

    def tell(self, value: float) -> str:
        """A value as text, as exactly as there is room for."""
        return (self.show_exactly or self.show)(value)


@dataclass(frozen=True)
class Scale:
    """An axis laid out: where on the page each value is."""

    axis: Axis
    low: float
    high: float
    begin: float  # on the page
    end: float
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        """The place of a value."""
        low, high, at = self.low, self.high, value
        if self.axis.log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return self.begin + (at - low) / (high - low) * (self.end - self.begin)

    def holds(self, value: float | None) -> bool:
        """Whether a value has a place at all."""
        return is_number(value) and (value > 0 or not self.axis.log)


def lay_out(
    axis: Axis, values: Iterable[float | None], *, begin: float, end: float, ticks: int = 5
) -> Scale:
    """Choose an axis's ends and about so many ticks for these values.

    Args:
        axis: What it is like.
        values: All that shall be on it; those that are no numbers are passed over.
        begin: Where on the page it begins.
        end: Where it ends.
        ticks: About how many.
    """
    real = [value for value in values if is_number(value) and (value > 0 or not axis.log)]
    real += [axis.up_to] if axis.up_to is not None else []
    low, high = min(real, default=0.0), max(real, default=1.0)
    if axis.log:
        found = _powers(low, high) if real else [1.0, 10.0]
        return Scale(axis, found[0], found[-1], begin, end, tuple(found))
    if axis.from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        # One value only: room on both sides of it, or above it.
        room = 0.5 if axis.whole else abs(low) / 10 or 1.0
        low, high = (low if axis.from_zero else low - room), high + room
    step = _step((high - low) / ticks, whole=axis.whole)
    if axis.whole:  # time-like: not rounded outwards, or half a figure may be empty
        found = [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if not found:  # all values lie between two whole numbers
            low = step * math.floor(low / step)
            found = [low]
        return Scale(axis, low, high, begin, end, tuple(found))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    found = [step * n for n in range(first, last + 1)]
    return Scale(axis, found[0], found[-1], begin, end, tuple(found))


def _step(size: float, *, whole: bool) -> float:
    """The round number next above a size."""
    power = 10.0 ** math.floor(math.log10(size))
    step = next(power * digit for digit in _ROUND if power * digit >= size * (1 - 1e-9))
    if whole:
        step = max(1.0, step if step == int(step) else math.ceil(step))
    return step


def _powers(low: float, high: float) -> Sequence[float]:
    """1, 2 or 5 times powers of ten around the values; powers of ten alone where they are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first >= 4:
        return [10.0**n for n in range(first, last + 1)]
    found = [10.0**n * digit for n in range(first, last + 1) for digit in (1, 2, 5)]
    below = [value for value in found if value <= low * (1 + 1e-9)]
    above = [value for value in found if value >= high * (1 - 1e-9)]
    end = above[0] if above[0] > below[-1] else found[found.index(above[0]) + 1]
    return [value for value in found if below[-1] <= value <= end]
