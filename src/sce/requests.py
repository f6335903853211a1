"""Requests for recommendations in the ids of users, looked up in the catalogue; and answers."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from sce.data.columns import ITEM, USER
from sce.data.requests import (
    SHOWN,
    Id,
    Listed,
    Query,
    Recommended,
    Request,
    list_ids,
    list_request,
    look_up,
)
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError, InputWarning, allowed, checked, fits, named, show_value
from sce.evaluation.queries import ItemFilter
from sce.evaluation.ranking import check_depth
from sce.units import plural

SIMILAR = "similar_id"
_OPTIONS = {"k": int | None, "keep_seen": bool | None}


def read_requests(
    item_ids: Vocabulary, given: Sequence[Any], first: int, k: int, keep_seen: bool
) -> list[Query]:
    """Look up histories and requests, of which the first has a number."""
    requests = [one if isinstance(one, Request) else Request(one) for one in given]
    listed = []
    for number, one in enumerate(requests, first):
        try:
            for name, kind in _OPTIONS.items():
                if not fits(value := getattr(one, name), kind):
                    raise InputError(f"{name} must be {allowed(kind)}; got {show_value(value)}")
            if one.k is not None:
                check_depth(one.k, len(item_ids))
            listed.append(list_request(one))
        except InputError as error:
            raise InputError(
                f"{one.where or f'history {number} (the first is 0)'}: {error}"
            ) from error
    return look_up(item_ids, requests, listed, k, keep_seen)


def read_filter(item_ids: Vocabulary, allow: Listed, block: Listed) -> ItemFilter:
    """Look up the items that may, and those that may not, be recommended to anybody.

    Unknown ones are skipped with a warning; where all that are allowed are unknown, refused.
    """
    found = {}
    for name, given in (("allow", allow), ("block", block)):
        listed = [] if given is None else list_ids(given, named(name), ordered=False)
        codes = item_ids.lookup(listed)
        if len(missing := np.flatnonzero(codes < 0)):
            shown = ", ".join(str(listed[n]) for n in missing[:SHOWN])
            of = f"{plural(len(listed), 'item')} of {named(name)}"
            more = " ..." * (len(missing) > SHOWN)
            if name == "allow" and len(missing) == len(listed):
                raise InputError(
                    f"nothing to recommend: none of {of} is in the catalogue ({shown}{more}); "
                    "ids must be written as in the log"
                )
            what = f"skipped {len(missing):,} of {of}, not in the catalogue ({shown}{more})"
            warnings.warn(what, InputWarning, stacklevel=4)
        found[name] = codes[codes >= 0]
    return ItemFilter.choose(
        len(item_ids), None if allow is None else found["allow"], found["block"]
    )


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
        lines = [f"  {found}" for found in self[:SHOWN]] + ["  ..."] * (len(self) > SHOWN)
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
