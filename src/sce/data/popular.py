"""The most popular items: for users of whom nothing is known, and as targets apart from others."""

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.integer[Any]]
_EVENTS_AT_ONCE = 1 << 24  # counted by a function that copies its input


def count_items(events: Codes, n_items: int) -> NDArray[np.int64]:
    """Count how often each item occurs."""
    counts = np.zeros(n_items, dtype=np.int64)
    for first in range(0, len(events), _EVENTS_AT_ONCE):
        counts += np.bincount(events[first : first + _EVENTS_AT_ONCE], minlength=n_items)
    return counts


def popular_half(counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which items are popular: the fewest that together have half of the events.

    Of items with equally many events, the first in the catalogue.
    """
    order = np.argsort(-counts, kind="stable")
    ends = counts[order].cumsum()
    popular = np.zeros(len(counts), dtype=bool)
    popular[order[: np.searchsorted(2 * ends, counts.sum()) + 1]] = True
    return popular & (counts > 0)


class MostPopular:
    """Items by the number of their training events; of equally many, the first in the catalogue."""

    def __init__(self, counts: NDArray[np.int64]) -> None:
        self.counts = counts

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        return np.argsort(-self.counts, kind="stable")

    def best(
        self, k: int, *, kept: Codes | None = None, masked: Codes | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Items and counts of the k most popular, or of all that are left, the first the most so.

        They are chosen from those `kept`, by default all, without those `masked`.
        """
        never = np.empty(0, np.int64) if masked is None else masked
        if kept is None:
            found = self._order[: k + len(never)]
        else:
            some = np.unique(kept).astype(np.int64)
            found = some[np.argsort(-self.counts[some], kind="stable")]
        found = found[~np.isin(found, never)][:k]
        return found, self.counts[found].astype(np.float32)
