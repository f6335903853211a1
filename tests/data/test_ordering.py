import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.data.values import sort_rows


def check_order(users: list[int], times: list[int]) -> None:
    rows = range(len(users))
    expected = sorted(rows, key=lambda row: (users[row], times[row]))  # Python's sort is stable
    got_users, got_items, got_times = sort_rows(
        np.array(users, np.int32), np.arange(len(users), dtype=np.int32), np.array(times, np.int64)
    )
    assert got_items.tolist() == expected
    assert got_users.tolist() == [users[row] for row in expected]
    assert got_times.tolist() == [times[row] for row in expected]
    assert [str(a.dtype) for a in (got_users, got_items, got_times)] == ["int32", "int32", "int64"]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, 2**31 - 1]),
            st.sampled_from([0, 1, -5, 2**40, 2**63 - 1, -(2**63)]) | st.integers(0, 3),
        ),
        min_size=1,
    )
)
def test_by_user_then_time_then_input(rows: list[tuple[int, int]]) -> None:
    check_order([user for user, _ in rows], [time for _, time in rows])


@pytest.mark.parametrize("spread", [1, 2**50], ids=["one key", "two keys"])
def test_many_ties_keep_the_order_of_the_input(spread: int) -> None:
    random = np.random.default_rng(0)
    users = random.integers(0, 20_000, 100_000)
    times = random.integers(0, 3, 100_000) * spread
    check_order(users.tolist(), times.tolist())


def test_sorted_rows_are_returned_as_they_are() -> None:
    users, items = np.array([0, 0, 3], np.int32), np.array([5, 4, 3], np.int32)
    assert sort_rows(users, items, np.array([7, 7, 9], np.int64))[1] is items
