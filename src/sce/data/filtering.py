"""Minimum counts: leave out items that few users met, and users who met few items."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sce.data.interactions import Interactions
from sce.data.tally import Tally
from sce.errors import InputError

Report = Callable[[Tally], object]

_ROWS_AT_ONCE = 1 << 14


def keep_active(
    interactions: Interactions,
    *,
    min_item_users: int = 5,
    min_user_items: int = 20,
    iterate: bool = False,
    report: Report | None = None,
) -> Interactions:
    """Keep items with enough distinct users, then users with enough distinct items.

    This is the paper's procedure: each step once, items first, so that an item may end up with
    fewer users than asked for once users have left.

    Args:
        interactions: The log.
        min_item_users: Distinct users that an item needs; 1 keeps every item.
        min_user_items: Distinct items that a user needs, among those the item step left; 1 keeps
            every user.
        iterate: Repeat both steps until neither leaves anything out.
        report: Called with the counts after each step.

    Returns:
        The rows that remain, in their order, with the vocabularies of the whole log.

    Raises:
        InputError: When a step leaves nothing.
    """
    for name, minimum in [("min-item-users", min_item_users), ("min-user-items", min_user_items)]:
        if minimum < 1:
            raise InputError(f"--{name} must be at least 1 (1 keeps everything), got {minimum}")
    if not len(interactions) or (min_item_users == 1 and min_user_items == 1):
        return interactions

    pairs = _distinct_pairs(interactions)
    rows = np.ones(len(interactions), bool)
    item_users = np.bincount(pairs.items, minlength=len(interactions.item_ids))
    rounds = 0
    while True:
        size, rounds = len(pairs.users), rounds + 1

        kept_items = item_users >= min_item_users
        if not kept_items.any():
            raise InputError(
                f"nothing is left after the item filter{_in_round(rounds)}: no item has "
                f"{min_item_users} distinct users, the most popular has {item_users.max()}; "
                "lower --min-item-users"
            )
        pairs = pairs.where(kept_items.take(pairs.items))
        rows &= kept_items.take(interactions.items)
        user_items = np.bincount(pairs.users, minlength=len(interactions.user_ids))
        if report is not None and rounds == 1 and min_item_users > 1:
            name = f"items with at least {min_item_users} users"
            report(_tally(name, user_items, np.where(kept_items, item_users, 0), rows))

        kept_users = user_items >= min_user_items
        if not kept_users.any():
            raise InputError(
                f"nothing is left after the user filter{_in_round(rounds)}: no user has "
                f"{min_user_items} distinct items, the most active has {user_items.max()}; "
                "lower --min-user-items"
            )
        pairs = pairs.where(kept_users.take(pairs.users))
        rows &= kept_users.take(interactions.users)
        item_users = np.bincount(pairs.items, minlength=len(interactions.item_ids))
        if report is not None and rounds == 1 and min_user_items > 1:
            name = f"users with at least {min_user_items} items"
            report(_tally(name, np.where(kept_users, user_items, 0), item_users, rows))

        if not iterate or len(pairs.users) == size:
            break
    if report is not None and iterate:
        name = f"repeated until nothing changes ({rounds} rounds)"
        report(_tally(name, np.where(kept_users, user_items, 0), item_users, rows))
    del pairs
    return interactions if rows.all() else _rows(interactions, rows)


def drop_repeats(interactions: Interactions, *, report: Report | None = None) -> Interactions:
    """Keep a user's first interaction with each item, and leave out the later ones."""
    if len(interactions):
        # Sorted by item and then by row, the rows of one item lie in the order of the log: by
        # user, then by time. Each first row of a user is a first meeting. Rows fit 32 bits.
        keys = _pack(interactions.items, np.arange(len(interactions)))
        keys.sort()
        rows = keys & 0xFFFFFFFF
        keys >>= 32
        users = interactions.users[rows]
        first = _changes(keys) | _changes(users)
        kept = np.zeros(len(interactions), bool)
        kept[rows[first]] = True
        if not kept.all():
            interactions = _rows(interactions, kept)
    if report is not None:
        report(Tally.of("first interaction of each user with each item", interactions))
    return interactions


class _Pairs(NamedTuple):
    """Each user and item that met, once."""

    users: NDArray[np.int32]
    items: NDArray[np.int32]

    def where(self, kept: NDArray[np.bool_]) -> "_Pairs":
        return self if kept.all() else _Pairs(self.users[kept], self.items[kept])


def _distinct_pairs(interactions: Interactions) -> _Pairs:
    """Sort users and items packed into one integer; equal pairs then lie side by side.

    The rows of a user lie together, so the log is sorted in parts of whole users, each inside the
    processor's cache. Users count from the first of the part, which leaves room for most catalogues
    in 32 bits: these sort twice as fast as 64.
    """
    users, items = interactions.users, interactions.items
    item_bits = max(1, (len(interactions.item_ids) - 1).bit_length())
    users_at_once = max(1, len(interactions.user_ids) * _ROWS_AT_ONCE // len(users))
    room = 1 << (32 - item_bits)
    key: type[np.unsignedinteger[Any]] = np.uint64
    if users_at_once <= 4 * room:
        key = np.uint32
        users_at_once = min(users_at_once, room)
    first_users = np.arange(0, len(interactions.user_ids), users_at_once)
    edges = [*np.searchsorted(users, first_users).tolist(), len(users)]
    found = _Pairs(np.empty_like(users), np.empty_like(items))
    size = 0
    for first, start, end in zip(first_users.tolist(), edges, edges[1:], strict=False):
        keys = (users[start:end] - np.int32(first)).astype(key)
        keys <<= key(item_bits)
        keys |= items[start:end].astype(key)
        keys.sort()
        keys = keys[_changes(keys)]
        part = slice(size, size := size + len(keys))
        np.add(keys >> key(item_bits), key(first), out=found.users[part], casting="unsafe")
        np.bitwise_and(keys, key((1 << item_bits) - 1), out=found.items[part], casting="unsafe")
    return _Pairs(found.users[:size], found.items[:size])


def _tally(
    name: str,
    user_items: NDArray[np.int64],
    item_users: NDArray[np.int64],
    rows: NDArray[np.bool_],
) -> Tally:
    return Tally(name, *(int(np.count_nonzero(of)) for of in (user_items, item_users, rows)))


def _in_round(round_: int) -> str:
    return f" in round {round_}" if round_ > 1 else ""


def _rows(interactions: Interactions, kept: NDArray[np.bool_]) -> Interactions:
    return replace(
        interactions,
        users=interactions.users[kept],
        items=interactions.items[kept],
        timestamps=interactions.timestamps[kept],
    )


def _pack(high: NDArray[np.int32], low: NDArray[np.signedinteger[Any]]) -> NDArray[np.int64]:
    """Two codes in one integer that sorts by the first, then by the second."""
    keys = high.astype(np.int64)
    keys <<= 32
    keys |= low
    return keys


def _changes(values: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """Where a value differs from the one before it; the first always does."""
    changes = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes
