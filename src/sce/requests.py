"""Requests for recommendations in the ids of users, looked up in the catalogue; and answers."""

import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sce.data.columns import ITEM, USER
from sce.data.prepared import since_first
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError, InputWarning, allowed, checked, fits, named, show_value
from sce.evaluation.queries import ItemFilter, Query
from sce.evaluation.ranking import check_depth
from sce.serving.engine import check_times
from sce.units import plural

Id = int | str
Listed = Iterable[Id] | None  # None: nothing is said
SIMILAR = "similar_id"
_SHOWN = 3  # in a repr or a message
_LISTS = ("history", "allow", "block")  # of a request
_OPTIONS = {"k": int | None, "keep_seen": bool | None}


@dataclass(frozen=True, eq=False)
class Request:
    """A history with wishes of its own; what is None is as for all histories."""

    history: Iterable[Id]
    k: int | None = None
    keep_seen: bool | None = None
    allow: Listed = None
    """Recommend only these items, of those that all histories may get."""
    block: Listed = None
    """Recommend none of these items, nor of those that no history gets."""
    times: Sequence[int] | None = None
    """Seconds of each event, since any moment, for a model that uses times; by default all events
    are of one moment. What is asked for comes right after the last."""
    where: str = ""
    """Where it was read, for messages."""


class Read(NamedTuple):
    """A request in codes, and the ids that are not in the catalogue."""

    query: Query
    unknown: tuple[Id, ...]  # of the history
    unlisted: tuple[Id, ...]  # of allow and block


def read_requests(
    item_ids: Vocabulary, given: Sequence[Any], first: int, k: int, keep_seen: bool
) -> list[Read]:
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
            listed.append(list_ids(one.history, "history"))
            if one.times is not None:
                check_times(one.times, listed[-1])
            for name in ("allow", "block"):
                some = getattr(one, name)
                listed.append([] if some is None else list_ids(some, name, ordered=False))
        except InputError as error:
            raise InputError(
                f"{one.where or f'history {number} (the first is 0)'}: {error}"
            ) from error
    ends = np.cumsum([len(ids) for ids in listed])[:-1]
    codes = np.split(item_ids.lookup(list(chain(*listed))), ends)
    known = [found[found >= 0] for found in codes]
    unknown = [
        tuple(ids[n] for n in np.flatnonzero(found < 0))
        for ids, found in zip(listed, codes, strict=True)
    ]
    read = []
    for place, one in zip(range(0, len(listed), len(_LISTS)), requests, strict=True):
        history, allow, block = known[place : place + len(_LISTS)]
        times = None if one.times is None else since_first(one.times)[codes[place] >= 0]
        query = Query(
            history,
            k if one.k is None else one.k,
            keep_seen if one.keep_seen is None else one.keep_seen,
            None if one.allow is None else allow,
            block,
            times,
        )
        read.append(Read(query, unknown[place], unknown[place + 1] + unknown[place + 2]))
    return read


def read_filter(item_ids: Vocabulary, allow: Listed, block: Listed) -> ItemFilter:
    """Look up the items that may, and those that may not, be recommended to anybody.

    Unknown ones are skipped with a warning; where all that are allowed are unknown, refused.
    """
    found = {}
    for name, given in (("allow", allow), ("block", block)):
        listed = [] if given is None else list_ids(given, named(name), ordered=False)
        codes = item_ids.lookup(listed)
        if len(missing := np.flatnonzero(codes < 0)):
            shown = ", ".join(str(listed[n]) for n in missing[:_SHOWN])
            of = f"{plural(len(listed), 'item')} of {named(name)}"
            more = " ..." * (len(missing) > _SHOWN)
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


def list_ids(given: Any, where: str, *, ordered: bool = True) -> list[Id]:
    """A list of ids; anything else would be looked up as something that nobody meant."""
    if isinstance(given, np.ndarray):
        given = given.tolist()
    unordered = isinstance(given, Mapping) or (ordered and isinstance(given, Set))
    if unordered or isinstance(given, str | bytes | int) or not isinstance(given, Iterable):
        raise InputError(f"{where} must be a list of ids; got {show_value(given)}")
    listed = list(given)
    for kind in {type(one) for one in listed} - {int, str}:
        if kind is bool or not issubclass(kind, int | str | np.integer):
            wrong = next(one for one in listed if type(one) is kind)
            raise InputError(
                f"{where}: ids are integers or strings; got {show_value(wrong)} ({kind.__name__})"
            )
    return listed


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
