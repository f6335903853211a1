"""Order of each user's events: that of the users, or that in which the log is stored?

A step goes from one event of a user to the next. Where events share a time, the order of the rows
decides: a log that is stored by item then teaches a model the order of the items.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sce.data.interactions import Interactions, Parts
from sce.errors import named

_EVENTS = 300_000  # of a sample of users: about so many are looked at
_SHUFFLES = 3
_SEED = 0x5CE  # another than anybody chooses for --ties shuffle: twice the same undoes it
_FEW = 400  # steps: a share of ascending ones is a chance result more easily


def describe_order(parts: Parts[Interactions]) -> dict[str, float | None]:
    """Figures of the order of events in all parts; None where a log is too small to tell.

    Returns:
        tied: Share of steps between events of one time.
        one_time_users: Share of the users with three events or more whose events share one time.
        ascending: Share of steps that go to a larger item id, 0.5 by chance.
        ascending_ties: The same of steps between events of one time.
        recurrence: How often the same step recurs, relative to each user's events shuffled.
        recurrence_ties: The same relative to each user's events of one time shuffled.
    """
    stride = max(1, sum(map(len, parts)) // _EVENTS)
    chosen, n_users = [], 0
    for part in parts:
        codes = part.users + np.int32(n_users)
        kept = codes % stride == 0
        chosen.append((codes[kept], part.items[kept], part.timestamps[kept]))
        n_users += len(part.user_ids)
    users, items, times = map(np.concatenate, zip(*chosen, strict=True))
    steps = users[1:] == users[:-1]
    tied = steps & (times[1:] == times[:-1])
    moved = steps & (items[1:] != items[:-1])
    up = items[1:] > items[:-1]
    first = np.flatnonzero(np.diff(users, prepend=np.int32(-1)))
    last = np.append(first[1:], len(users)) - 1
    several = last - first >= 2
    return {
        "tied": _share(tied[steps]),
        "one_time_users": _share((times[first] == times[last])[several]),
        "ascending": _share(up[moved], _FEW),
        "ascending_ties": _share(up[moved & tied], _FEW),
        "recurrence": _recurrence(users, items, users),
        "recurrence_ties": (
            _recurrence(users, items, _moments(users, times)) if tied.any() else None
        ),
    }


def order_warning(found: dict[str, float | None], *, ties: str = "keep") -> str | None:
    """A sentence about figures of `describe_order` that are no accident."""
    harmless = (0.0, 0.0, 0.5, 0.5, 2.0, 1.0)  # what an unknown figure counts as
    pairs = zip(found.values(), harmless, strict=True)
    tied, one_time, up, tied_up, recurs, ties_recur = (
        default if value is None else value for value, default in pairs
    )
    if one_time >= 0.5:
        return f"the events of {one_time:.0%} of the users share one time: no order can be learned"
    if abs(up - 0.5) >= 0.3:
        return (
            f"{max(up, 1 - up):.0%} of all steps go to the {'larger' if up > 0.5 else 'smaller'} "
            "item id (50% by chance): unless users do take items in that order, such as episodes, "
            "the log was sorted by item, and a model learns little else"
        )
    if recurs < 1.05:
        return (
            f"the same steps recur {recurs:.2f} times as often as with each user's events "
            "shuffled: the order of this log says nothing"
        )
    if ties == "shuffle" or tied < 0.01:
        return None
    if abs(tied_up - 0.5) >= 0.1:
        by = f"{tied_up:.0%} of these go to the larger item id, 50% by chance"
    elif ties_recur >= 1.1:
        by = f"the same steps recur {ties_recur:.2f} times as often as with these shuffled"
    else:
        return None
    return (
        f"{tied:.0%} of steps join events of one time, as in baskets or dates without hours, and "
        f"their stored order is not random ({by}): unless it is the true order, add "
        f"{named('ties', 'shuffle')}; without, a model learns how the log was stored"
    )


def shuffle_ties(parts: Parts[Interactions], seed: int) -> None:
    """Put each user's events of one time in random order, in place."""
    random = np.random.Generator(np.random.PCG64(seed))
    first = 0
    for number, part in enumerate(parts):
        # Numbered through all parts: what is added to them is rounded as in a log of one part.
        moments = _moments(part.users, part.timestamps) + first
        parts[number] = replace(part, items=_shuffled(part.items, moments, random))
        first = int(moments[-1]) + 1


def count_duplicates(log: Interactions) -> int:
    """Rows whose user, item and time are those of an earlier row."""
    moments = _moments(log.users, log.timestamps)
    tied = moments[1:] == moments[:-1]
    tied = np.append(tied, False) | np.append(False, tied)
    rows = moments[tied] << 32 | log.items[tied]
    return len(rows) - len(np.unique(rows))


def _moments(users: NDArray[np.int32], times: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number for each event, ascending, and equal for those of one user and time."""
    changes = (users[1:] != users[:-1]) | (times[1:] != times[:-1])
    return np.cumsum(np.append(np.zeros(1, bool), changes))


def _share(true: NDArray[np.bool_], least: int = 1) -> float | None:
    return None if len(true) < least else round(float(np.mean(true)), 4)


def _recurrence(
    users: NDArray[np.int32], items: NDArray[np.int32], groups: NDArray[Any]
) -> float | None:
    """Pairs of equal steps, relative to the items of each group shuffled; None if uncertain."""
    random = np.random.Generator(np.random.PCG64(_SEED))
    orders = [items, *(_shuffled(items, groups, random) for _ in range(_SHUFFLES))]
    stored, *shuffled = (_equal_steps(users, order) for order in orders)
    mean = float(np.mean(shuffled))
    uncertain = mean < 100 or float(np.std(shuffled)) > 0.03 * mean
    return None if uncertain else round(stored / mean, 4)


def _equal_steps(users: NDArray[np.int32], items: NDArray[np.int32]) -> int:
    moved = (users[1:] == users[:-1]) & (items[1:] != items[:-1])
    steps = ((items[:-1].astype(np.int64) << 32) | items[1:])[moved]
    counts = np.unique(steps, return_counts=True)[1]
    return int(np.sum(counts * (counts - 1)) // 2)


def _shuffled(
    items: NDArray[np.int32], groups: NDArray[Any], random: np.random.Generator
) -> NDArray[np.int32]:
    """Items in random order within their groups, which are numbered in ascending order."""
    return items[np.argsort(groups + random.random(len(items)), kind="stable")]
