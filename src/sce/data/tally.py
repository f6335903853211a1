"""How much there is, counted one way everywhere: the rows of the paper's table of datasets."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sce.data.interactions import Interactions


@dataclass(frozen=True)
class Tally:
    """Distinct users, distinct items and interactions, under the name of what they are."""

    name: str
    users: int
    items: int
    interactions: int

    @classmethod
    def of(cls, name: str, interactions: Interactions) -> "Tally":
        """Count a whole log."""
        return cls(name, interactions.n_users, interactions.n_items, len(interactions))

    @property
    def density(self) -> float:
        """Interactions per pair of user and item."""
        pairs = self.users * self.items
        return self.interactions / pairs if pairs else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def mark_present(codes: NDArray[np.int32], size: int) -> NDArray[np.bool_]:
    """Which of the codes 0 .. size - 1 occur."""
    present = np.zeros(size, bool)
    present[codes] = True
    return present


def count_distinct(codes: NDArray[np.int32], size: int) -> int:
    """How many of the codes 0 .. size - 1 occur."""
    return int(np.count_nonzero(mark_present(codes, size)))
