from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.data import filtering
from sce.data.filtering import drop_repeats, keep_active
from sce.data.interactions import Interactions, Tally, tally_parts
from sce.data.reading import read_interactions
from sce.errors import InputError

Row = tuple[int, int, int]  # user, item, time


def log_of(rows: Sequence[Row]) -> Interactions:
    frame = pl.DataFrame(rows, ["user", "item", "time"], orient="row")
    return read_interactions(frame, time_unit="us")


def rows_of(log: Interactions) -> list[Row]:
    users = [int(user) for user in log.user_ids.decode(log.users)]
    items = [int(item) for item in log.item_ids.decode(log.items)]
    return list(zip(users, items, log.timestamps.tolist(), strict=True))


def naive_step(rows: list[Row], min_item_users: int, min_user_items: int) -> list[Row]:
    users_of: dict[int, set[int]] = {}
    for user, item, _ in rows:
        users_of.setdefault(item, set()).add(user)
    rows = [row for row in rows if len(users_of[row[1]]) >= min_item_users]
    items_of: dict[int, set[int]] = {}
    for user, item, _ in rows:
        items_of.setdefault(user, set()).add(item)
    return [row for row in rows if len(items_of[row[0]]) >= min_user_items]


logs = st.lists(
    st.tuples(st.integers(-3, 6), st.integers(10, 18), st.integers(0, 30)), min_size=1, max_size=60
)

#          user, item, time
WORKED = [
    (1, 10, 0),
    (1, 10, 1),  # a repeat: not another user of item 10, not another item of user 1
    (1, 20, 2),
    (2, 10, 3),
    (2, 20, 4),
    (2, 30, 5),
    (3, 30, 6),
    (3, 40, 7),
    (3, 40, 8),
]


def test_items_go_first_and_users_are_counted_on_what_is_left() -> None:
    steps: list[Tally] = []
    kept = keep_active(log_of(WORKED), min_item_users=2, min_user_items=2, report=steps.append)
    # Item 40 has one user. Without it user 3 has one item left, and leaves; item 30 stays with
    # one user, because each step runs once.
    assert rows_of(kept) == WORKED[:6]
    assert steps == [
        Tally("items with at least 2 users", 3, 3, 7),
        Tally("users with at least 2 items", 2, 3, 6),
    ]


def test_iterating_goes_on_to_a_fixed_point() -> None:
    steps: list[Tally] = []
    kept = keep_active(
        log_of(WORKED), min_item_users=2, min_user_items=2, iterate=True, report=steps.append
    )
    assert rows_of(kept) == WORKED[:5]
    assert steps[2:] == [Tally("repeated until nothing changes (3 rounds)", 2, 2, 5)]


def test_repeats_keep_the_first_event() -> None:
    kept = drop_repeats(log_of(WORKED))
    assert rows_of(kept) == [row for row in WORKED if row not in {(1, 10, 1), (3, 40, 8)}]


def test_a_log_without_repeats_or_rare_ids_is_returned_as_it_is() -> None:
    log = log_of([(user, item, item) for user in range(3) for item in range(4)])
    assert drop_repeats(log) is log
    assert keep_active(log, min_item_users=3, min_user_items=4) is log
    assert keep_active(log, min_item_users=1, min_user_items=1) is log


@settings(max_examples=60, deadline=None)
@given(logs, st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(1, 70))
def test_filters_equal_a_naive_loop(
    rows: list[Row], min_item_users: int, min_user_items: int, iterate: bool, at_once: int
) -> None:
    log = log_of(rows)
    expected = naive_step(rows_of(log), min_item_users, min_user_items)
    while iterate and (again := naive_step(expected, min_item_users, min_user_items)) != expected:
        expected = again
    steps: list[Tally] = []
    options = {"min_item_users": min_item_users, "min_user_items": min_user_items}
    try:
        with pytest.MonkeyPatch.context() as patch:  # parts as small as a log of this size needs
            patch.setattr(filtering, "_ROWS_AT_ONCE", at_once)
            kept = keep_active(log, **options, iterate=iterate, report=steps.append)
    except InputError:
        assert expected == []
        return
    assert rows_of(kept) == expected
    if steps:
        assert steps[-1] == tally_parts(steps[-1].name, [kept])


@settings(max_examples=50, deadline=None)
@given(logs)
def test_dropping_repeats_equals_a_naive_loop(rows: list[Row]) -> None:
    log, met, expected = log_of(rows), set(), []
    for row in rows_of(log):
        if row[:2] not in met:
            met.add(row[:2])
            expected.append(row)
    assert rows_of(drop_repeats(log)) == expected


class Sized:
    """As large as a vocabulary that would not fit a test."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def test_codes_near_the_largest_pack_without_collision() -> None:
    top = 2**31 - 2
    users = np.array([0, 0, top, top], np.int32)
    items = np.array([top, top, 0, top], np.int32)
    ids: Any = Sized(top + 1)
    kept = drop_repeats(Interactions(users, items, np.arange(4), ids, ids))
    assert kept.users.tolist() == [0, top, top]
    assert kept.items.tolist() == [top, 0, top]


# 24 bits of item leave room for 256 users in 32 bits: fewer at once, somewhat more, far more.
@pytest.mark.parametrize("users_at_once", [50, 600, 5000])
def test_pairs_of_a_large_catalogue_keep_apart(
    users_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = np.array([2**24 - 1, 0, 2**24 - 1], np.int32)
    users = np.repeat(np.arange(1000, dtype=np.int32), 3)
    user_ids: Any = Sized(1000)
    item_ids: Any = Sized(2**24)
    log = Interactions(users, np.tile(items, 1000), np.arange(3000), user_ids, item_ids)
    monkeypatch.setattr(filtering, "_ROWS_AT_ONCE", 3 * users_at_once)
    pairs = filtering._distinct_pairs(log)
    assert pairs["user"].tolist() == np.repeat(np.arange(1000), 2).tolist()
    assert pairs["item"].tolist() == [0, 2**24 - 1] * 1000


@pytest.mark.parametrize(
    ("minimums", "message"),
    [
        ((9, 1), r"item filter: no item has 9 distinct users.*has 2"),
        ((1, 9), r"user filter: no user has 9 distinct items.*has 3"),
        ((0, 1), "min_item_users .*got 0"),
        ((1, 0), "min_user_items .*got 0"),
    ],
)
def test_minimums_that_leave_nothing_or_mean_nothing(
    minimums: tuple[int, int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        keep_active(log_of(WORKED), min_item_users=minimums[0], min_user_items=minimums[1])


def test_a_later_round_that_leaves_nothing_says_which() -> None:
    # Round 1 takes item 30 (one user) and then user 3 (one item), which leaves item 20 one user.
    rows = [(1, 10, 0), (1, 20, 1), (2, 10, 2), (2, 30, 3), (3, 20, 4)]
    with pytest.raises(InputError, match="item filter in round 2"):
        keep_active(log_of(rows), min_item_users=2, min_user_items=2, iterate=True)
