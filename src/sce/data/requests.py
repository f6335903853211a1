"""Requests for recommendations in the ids of users, their codes in a catalogue, and answers."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sce.data.vocabulary import Vocabulary
from sce.errors import InputError, show_value
from sce.units import plural

Id = int | str
Codes = NDArray[np.integer[Any]]
NONE: NDArray[np.int64] = np.empty(0, np.int64)
Listed = Iterable[Id] | None  # None: nothing is said
SHOWN = 3  # in a repr or a message


@dataclass(frozen=True)
class Request:
    """A history with wishes of its own; what is None is as for all histories.

    Ids that are not in the catalogue are passed over.
    """

    history: Iterable[Id]
    """Items of the user, the oldest event first."""
    k: int | None = None
    """Items wanted."""
    allow: Listed = None
    """Recommend only these items, of those that all histories may get."""
    block: Listed = None
    """Recommend none of these items, nor of those that no history gets."""
    keep_seen: bool | None = None
    """Recommend items of the history too."""
    times: Sequence[int] | None = None
    """Seconds of each event, since any moment, for a model that uses times; by default all events
    are of one moment. What is asked for comes right after the last."""
    where: str = ""
    """Where it was read, for messages."""


@dataclass(frozen=True, eq=False)
class Recommended:
    """The best items for one history, or the most similar to one item, best first.

    Equal scores are by catalogue index, lower first. There are fewer than k where the user has seen
    nearly everything, or few items may be recommended. Where nothing is known of the user (an empty
    history, or one of unknown items only) they are the most popular ones; a user who is not in the
    log gets none.
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
        best = ", ".join(map(repr, self.items[:SHOWN]))
        best = f": {best}{' ...' * (len(self) > SHOWN)}" * bool(self.items)
        return f"Recommended({plural(len(self), 'item')}{best})"

    def __len__(self) -> int:
        return len(self.items)

    @property
    def ranks(self) -> NDArray[np.int64]:
        """1 for the best item, 2 for the next, and so on."""
        return np.arange(1, len(self.items) + 1)


class Query(NamedTuple):
    """A request in codes, and the ids that are not in the catalogue."""

    history: Codes
    k: int
    keep_seen: bool
    allow: Codes | None = None  # None: all
    block: Codes = NONE
    times: Codes | None = None  # seconds since the first event; None: all of one moment
    unknown: tuple[Id, ...] = ()  # of the history
    unlisted: tuple[Id, ...] = ()  # of allow and block

    @property
    def hidden(self) -> Codes:
        """Items that are not to be ranked."""
        return self.block if self.keep_seen else np.concatenate([self.block, self.history])

    def answer(
        self, items: list[Id], scores: NDArray[np.float32], titles: Any = None, *, popular: bool
    ) -> Recommended:
        """What was found for it; for an empty history, what is `popular` if that is known."""
        known, facts = len(self.history), (self.unknown, self.k, self.unlisted, titles)
        source: Any = "popular" if popular and not known else "model"
        return Recommended(items, scores, known, *facts, source)


def list_request(one: Request) -> list[list[Id]]:
    """Its history, and the items that it allows and blocks; refused where one is no list of ids."""
    history = list_ids(one.history, "history")
    if one.times is not None:
        check_times(one.times, history)
    lists = {"allow": one.allow, "block": one.block}.items()
    listed = (([] if ids is None else list_ids(ids, name, ordered=False)) for name, ids in lists)
    return [history, *listed]


def look_up(
    item_ids: Vocabulary,
    requests: Sequence[Request],
    listed: Sequence[Sequence[Sequence[Id]]],
    k: int = 10,
    keep_seen: bool = False,
) -> list[Query]:
    """Look up requests, of which `list_request` gave the lists; one search for all of them.

    `k` and `keep_seen` are for those that do not say.
    """
    flat = [*chain.from_iterable(listed)]
    codes = item_ids.lookup([*chain.from_iterable(flat)])
    ends = np.cumsum([len(ids) for ids in flat])
    parts = [codes[end - len(ids) : end] for ids, end in zip(flat, ends.tolist(), strict=True)]
    # Few have unknown ids, and numpy takes long for many short arrays: these are found together.
    holed = {*np.searchsorted(ends[2::3], np.flatnonzero(codes < 0), "right").tolist()}
    queries = []
    for number, one in enumerate(requests):
        history, allow, block = found = parts[3 * number : 3 * number + 3]
        times = None if one.times is None else since_first(one.times)[history >= 0]
        missing: list[tuple[Id, ...]] = [()] * 3
        if number in holed:
            missing = [
                tuple(ids[n] for n in np.flatnonzero(some < 0).tolist())
                for ids, some in zip(listed[number], found, strict=True)
            ]
            history, allow, block = (some[some >= 0] for some in found)
        depth = k if one.k is None else one.k
        seen = keep_seen if one.keep_seen is None else one.keep_seen
        allowed = None if one.allow is None else allow
        query = Query(history, depth, seen, allowed, block, times)
        queries.append(query._replace(unknown=missing[0], unlisted=missing[1] + missing[2]))
    return queries


def list_ids(given: Any, where: str, *, ordered: bool = True) -> list[Id]:
    """A list of ids; anything else would be looked up as something that nobody meant."""
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if type(given) is not list:  # most are
        unordered = isinstance(given, Mapping) or (ordered and isinstance(given, Set))
        if unordered or isinstance(given, str | bytes | int) or not isinstance(given, Iterable):
            raise InputError(f"{where} must be a list of ids; got {show_value(given)}")
    listed = list(given)
    for kind in {*map(type, listed)} - {int, str}:
        if kind is bool or not issubclass(kind, int | str | np.integer):
            wrong = next(one for one in listed if type(one) is kind)
            raise InputError(
                f"{where}: ids are integers or strings; got {show_value(wrong)} ({kind.__name__})"
            )
    return listed


def check_times(times: object, history: Sequence[object]) -> None:
    """Refuse times that are not whole seconds, one for each event, in their order."""
    if not isinstance(times, list | tuple) or {*map(type, times)} - {int}:
        raise InputError(f"times are whole numbers of seconds; got {show_value(times)}")
    if len(times) != len(history):
        raise InputError(f"a history of {len(history)} events has as many times; got {len(times)}")
    if any(later < before for before, later in pairwise(times)):
        raise InputError(
            f"times do not go back, as the last event is last; got {show_value(times)}"
        )


def since_first(times: Sequence[int]) -> NDArray[np.int32]:
    """Seconds since the first of some events, given those of each since any moment."""
    most = np.iinfo(np.int32).max
    return np.array([min(max(0, each - times[0]), most) for each in times], np.int32)
