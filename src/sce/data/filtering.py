"""Minimum counts: leave out items that few users met, and users who met few items."""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sce.data.interactions import Interactions, Parts, Tally
from sce.errors import InputError, checked, named

Report = Callable[[Tally], object]
Pairs = Mapping[str, NDArray[np.int32]]  # "user" and "item": codes of each two that met, once

_ROWS_AT_ONCE = 1 << 14


@checked
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
    """
    parts, pairs = [interactions], list[Pairs]()
    options = {"min_item_users": min_item_users, "min_user_items": min_user_items}
    keep_active_parts(parts, pairs, **options, iterate=iterate, report=report)
    return parts[0]


def keep_active_parts(
    parts: Parts[Interactions],
    pairs: Parts[Pairs],
    *,
    min_item_users: int,
    min_user_items: int,
    iterate: bool,
    report: Report | None = None,
) -> None:
    """Filter the parts of a log in place, as `keep_active` does; `pairs` is an empty list to use.

    An item's distinct users add over parts, and each user is in one part.
    """
    steps = [("item", "user", min_item_users), ("user", "item", min_user_items)]
    for kind, other, minimum in steps:
        if minimum < 1:
            option = named(f"min_{kind}_{other}s")
            raise InputError(f"{option} must be at least 1 (1 keeps everything), got {minimum}")
    if not any(map(len, parts)) or (min_item_users == 1 and min_user_items == 1):
        return
    sizes = [{"user": len(part.user_ids), "item": len(part.item_ids)} for part in parts]
    for part in parts:
        pairs.append(_distinct_pairs(part))

    def count(kind: str) -> list[NDArray[np.int64]]:
        """Pairs of each item, or of each user of each part."""
        found = (
            np.bincount(codes[kind], minlength=size[kind])
            for codes, size in zip(pairs, sizes, strict=True)
        )
        return [*found] if kind == "user" else [reduce(np.add, found)]

    def rows(part: Interactions, number: int) -> NDArray[np.bool_]:
        return kept["item"][0].take(part.items) & kept["user"][number].take(part.users)

    def tell(name: str) -> None:
        if report is not None:
            users, items = (
                sum(int(np.count_nonzero(of)) for of in count(kind)) for kind in ("user", "item")
            )
            left = sum(int(np.count_nonzero(rows(part, n))) for n, part in enumerate(parts))
            report(Tally(name, users, items, left))

    kept = {"user": [np.ones(size["user"], bool) for size in sizes]}
    counts = count("item")
    size, left, rounds = -1, sum(len(codes["user"]) for codes in pairs), 0
    while left != size and (iterate or not rounds):
        size, rounds = left, rounds + 1
        for kind, other, minimum in steps:
            kept[kind] = [of >= minimum for of in counts]
            if not any(of.any() for of in kept[kind]):
                most = max(int(of.max(initial=0)) for of in counts)
                raise InputError(
                    f"nothing is left after the {kind} filter"
                    f"{f' in round {rounds}' if rounds > 1 else ''}: no {kind} has {minimum} "
                    f"distinct {other}s, the most {'popular' if kind == 'item' else 'active'} has "
                    f"{most}; lower {named(f'min_{kind}_{other}s')}"
                )
            for number, codes in enumerate(pairs):
                of_pairs = kept[kind][number if kind == "user" else 0].take(codes[kind])
                if not of_pairs.all():
                    pairs[number] = {key: values[of_pairs] for key, values in codes.items()}
            counts = count(other)
            if rounds == 1 and minimum > 1:
                tell(f"{kind}s with at least {minimum} {other}s")
        left = sum(len(codes["user"]) for codes in pairs)
    if iterate:
        tell(f"repeated until nothing changes ({rounds} rounds)")
    pairs.clear()
    for number, part in enumerate(parts):
        of_part = rows(part, number)
        if not of_part.all():
            parts[number] = part.where(of_part)


def drop_repeats(interactions: Interactions) -> Interactions:
    """Keep a user's first interaction with each item, and leave out the later ones."""
    # Sorted by item and then by row, the rows of one item lie in the order of the log: by user,
    # then by time. Each first row of a user is a first meeting. Rows fit 32 bits.
    keys = interactions.items.astype(np.int64)
    keys <<= 32
    keys |= np.arange(len(interactions))
    keys.sort()
    rows = keys & 0xFFFFFFFF
    keys >>= 32
    kept = np.zeros(len(interactions), bool)
    kept[rows[_changes(keys) | _changes(interactions.users[rows])]] = True
    return interactions if kept.all() else interactions.where(kept)


def _distinct_pairs(interactions: Interactions) -> Pairs:
    """Sort users and items packed into one integer; equal pairs then lie side by side.

    The rows of a user lie together, so the log is sorted in chunks of whole users, each inside the
    processor's cache. Users count from the first of the chunk, which leaves room for most
    catalogues in 32 bits: these sort twice as fast as 64.
    """
    users, items = interactions.users, interactions.items
    item_bits = max(1, (len(interactions.item_ids) - 1).bit_length())
    users_at_once = max(1, len(interactions.user_ids) * _ROWS_AT_ONCE // len(users))
    most_users = 1 << (32 - item_bits)
    key: type[np.unsignedinteger[Any]] = np.uint64
    if users_at_once <= 4 * most_users:
        key = np.uint32
        users_at_once = min(users_at_once, most_users)
    first_users = np.arange(0, len(interactions.user_ids), users_at_once)
    edges = [*np.searchsorted(users, first_users).tolist(), len(users)]
    found = {"user": np.empty_like(users), "item": np.empty_like(items)}
    size = 0
    for first, start, end in zip(first_users.tolist(), edges, edges[1:], strict=False):
        keys = (users[start:end] - np.int32(first)).astype(key)
        keys <<= key(item_bits)
        keys |= items[start:end].astype(key)
        keys.sort()
        keys = keys[_changes(keys)]
        chunk = slice(size, size := size + len(keys))
        np.add(keys >> key(item_bits), key(first), out=found["user"][chunk], casting="unsafe")
        mask = key((1 << item_bits) - 1)
        np.bitwise_and(keys, mask, out=found["item"][chunk], casting="unsafe")
    return {kind: codes[:size] for kind, codes in found.items()}


def _changes(values: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """True where a value differs from the one before it, and at the first."""
    changes = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes
