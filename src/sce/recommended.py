"""What was recommended, or found similar."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sce.data.columns import ITEM, USER
from sce.errors import checked
from sce.requests import Id
from sce.units import plural

SIMILAR = "similar_id"
_SHOWN = 3  # in a repr


@dataclass(frozen=True, eq=False)
class Recommended:
    """The best items for one history, or the most similar to one item, best first.

    There are fewer than k where the user has seen nearly everything, or few items may be
    recommended. Where nothing is known of the user (an empty history, or one of unknown items only)
    they are the most popular ones; a user who is not in the log gets none.
    """

    items: list[Id]
    """Ids of the items."""
    scores: NDArray[np.float32]
    """Their scores; comparable within this history only. Of popular items, how often they occur."""
    known: int
    """Number of events of the history that are in the catalogue."""
    unknown: tuple[Id, ...] = ()
    """The other events, in their order: they were skipped."""
    asked: int = 0
    """How many items were asked for."""
    unlisted: tuple[Id, ...] = ()
    """What a request of its own allows or blocks and is not in the catalogue: likewise."""
    titles: list[str] | None = None
    """Titles of the items, if the recommender has any; the id of an item that has none."""
    source: Literal["model", "popular"] = "model"
    """Who chose the items: the model, or how popular they are."""

    def __repr__(self) -> str:
        best = ", ".join(map(repr, self.items[:_SHOWN]))
        best = f": {best}{' ...' * (len(self) > _SHOWN)}" * bool(self.items)
        return f"Recommended({plural(len(self), 'item')}{best})"

    def __len__(self) -> int:
        return len(self.items)

    @property
    def ranks(self) -> NDArray[np.int64]:
        """1 for the best item, 2 for the next, and so on."""
        return np.arange(1, len(self.items) + 1)


class Recommendations(list[Recommended]):
    """Recommendations in the order of the histories."""

    def __init__(
        self,
        found: Iterable[Recommended],
        users: Sequence[Id] | None,
        backend: Any,
        columns: tuple[str, str] = (USER, ITEM),
    ) -> None:
        super().__init__(found)
        self.users, self._backend, self._columns = users, backend, columns

    def __repr__(self) -> str:
        lines = [f"  {found}" for found in self[:_SHOWN]] + ["  ..."] * (len(self) > _SHOWN)
        return "\n".join([f"Recommendations for {plural(len(self), 'user')}", *lines])

    @checked
    def to_frame(self, kind: Literal["pandas", "polars"] | None = None) -> Any:
        """A data frame with the columns user_id, item_id, score, rank (from 1), source and title.

        The source is "model", or "popular" for users of whom nothing is known. Without titles,
        there is no such column. Of similar items, the first two are item_id and similar_id.

        Args:
            kind: The library; by default that of the frame of histories. Where these were lists,
                polars, and user_id is the number of the history, the first 0.
        """
        import narwhals as nw

        users = range(len(self)) if self.users is None else self.users
        whose, what = self._columns
        columns = {
            whose: [user for user, found in zip(users, self, strict=True) for _ in found.items],
            what: [item for found in self for item in found.items],
            "score": np.concatenate([np.empty(0, np.float32), *(found.scores for found in self)]),
            "rank": np.concatenate([np.empty(0, np.int64), *(found.ranks for found in self)]),
        }
        if whose == USER:
            columns["source"] = [found.source for found in self for _ in found.items]
        if any(found.titles for found in self):
            columns["title"] = [title for found in self for title in found.titles or ()]
        return nw.from_dict(columns, backend=kind or self._backend).to_native()
