"""Requests for recommendations in the ids of users, looked up in the catalogue."""

import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from sce.data.prepared import since_first
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError, InputWarning, check_types, named
from sce.evaluation.queries import ItemFilter, Query
from sce.evaluation.ranking import check_depth
from sce.serving.engine import check_times
from sce.units import plural

Id = int | str
Listed = Iterable[Id] | None  # None: nothing is said
_SHOWN = 3
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
        where = f"history {number} (the first is 0)"
        check_types({name: getattr(one, name) for name in _OPTIONS}, _OPTIONS)
        if one.k is not None:
            check_depth(one.k, len(item_ids))
        listed.append(list_ids(one.history, where))
        if one.times is not None:
            check_times(one.times, listed[-1])
        for name, some in (("allow", one.allow), ("block", one.block)):
            listed.append(
                [] if some is None else list_ids(some, f"{name} of {where}", ordered=False)
            )
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

    Unknown ones are skipped with a warning.

    Raises:
        InputError: When some are allowed, and none of them is in the catalogue.
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
        raise InputError(f"{where} must be a list of ids; got {given!r}")
    listed = list(given)
    for kind in {type(one) for one in listed} - {int, str}:
        if kind is bool or not issubclass(kind, int | str | np.integer):
            wrong = next(one for one in listed if type(one) is kind)
            raise InputError(
                f"{where}: ids are integers or strings; got {wrong!r} ({kind.__name__})"
            )
    return listed
