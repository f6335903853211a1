"""A log of interactions in memory, and counts of it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sce.data.vocabulary import Vocabulary


@dataclass(frozen=True, eq=False)
class Interactions:
    """An encoded log of interactions.

    The rows are sorted by user code, then timestamp; rows of one user at the same time keep the
    order of the input: that of the files given, then of the lines in them.
    """

    users: NDArray[np.int32]  # [n] codes into user_ids
    items: NDArray[np.int32]  # [n] codes into item_ids
    timestamps: NDArray[np.int64]  # [n] microseconds since 1970-01-01 UTC
    user_ids: Vocabulary
    item_ids: Vocabulary
    dropped: int = 0  # rows of the input that were left out, as they lack a user, item or time

    def __len__(self) -> int:
        return len(self.users)

    def where(self, kept: NDArray[np.bool_]) -> "Interactions":
        """Some of the rows, with the vocabularies of all."""
        rows = (self.users[kept], self.items[kept], self.timestamps[kept])
        return Interactions(*rows, self.user_ids, self.item_ids, self.dropped)


@dataclass(frozen=True)
class Tally:
    """Counts of distinct users, distinct items and interactions, as in the paper's table."""

    name: str
    users: int
    items: int
    interactions: int


class TallyOfParts:
    """Counts of parts of a log that have no user in common."""

    def __init__(self, n_items: int) -> None:
        self._users = self._interactions = 0
        self._present = np.zeros(n_items, bool)

    def add(self, part: Interactions) -> None:
        """Count one part more."""
        self._users += int(np.count_nonzero(np.diff(part.users, prepend=np.int32(-1))))
        self._present[part.items] = True
        self._interactions += len(part)

    def tally(self, name: str) -> Tally:
        """Counts of all parts."""
        return Tally(name, self._users, int(np.count_nonzero(self._present)), self._interactions)
