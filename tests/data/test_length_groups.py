import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.data.length_groups import (
    LengthGroups,
    fits,
    group_by_length,
    group_widths,
    groups_for_all,
    shares_longer,
)

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def rows_and_positions(groups: LengthGroups) -> tuple[int, int]:
    return sum(rows for rows, _ in groups), sum(rows * width for rows, width in groups)


@given(lengths=LENGTHS)
def test_each_row_is_in_the_narrowest_group_that_holds_it(lengths: list[int]) -> None:
    longest = max(lengths)
    groups = group_by_length(torch.tensor(lengths), longest)
    of_rows = [width for rows, width in groups for _ in range(rows)]
    widths = group_widths(longest)
    in_order = sorted(lengths, reverse=True)
    assert of_rows == [min(w for w in widths if w >= length) for length in in_order]
    assert all(rows > 0 for rows, _ in groups)
    assert fits(torch.tensor(in_order), groups)


def test_a_batch_of_equal_rows_is_one_group() -> None:
    assert group_by_length(torch.tensor([7, 7, 7]), 7) == ((3, 7),)
    assert group_by_length(torch.tensor([0, 0]), 1) == ((2, 1),)
    assert groups_for_all([1.0, 1.0, 1.0], 64, 200) == ((64, 200),)


def binomial_tail(rows: int, share: float, beyond: int) -> float:
    """The probability of more than `beyond` of so many rows, term by term."""
    return math.fsum(
        math.comb(rows, k) * share**k * (1 - share) ** (rows - k)
        for k in range(beyond + 1, rows + 1)
    )


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 400), share=st.floats(0, 1))
def test_hardly_a_batch_has_more_long_rows_than_groups_have_room_for(
    rows: int, share: float
) -> None:
    groups = groups_for_all([share], rows, 2)  # widths of 2 and 1
    assert rows_and_positions(groups)[0] == rows
    wide = sum(n for n, width in groups if width == 2)
    assert binomial_tail(rows, share, wide) <= 1e-6
    # And little room is wasted.
    assert wide <= rows * share + 6 * math.sqrt(rows * share * (1 - share)) + 5


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, data=st.data())
def test_batches_fit_where_there_are_no_more_long_rows_than_that(
    lengths: list[int], data: st.DataObject
) -> None:
    rows = data.draw(st.integers(1, len(lengths)))
    every, longest = torch.tensor(lengths), max(lengths)
    shares = shares_longer(every, longest)
    groups = groups_for_all(shares, rows, longest, among=len(every))
    assert rows_and_positions(groups)[0] == rows
    assert rows_and_positions(groups)[1] <= rows * longest
    if rows == len(lengths):  # the one batch there is needs no more than itself
        assert groups == group_by_length(every, longest)
    chosen = every[torch.tensor(data.draw(st.permutations(range(len(lengths))))[:rows])]
    exact = group_by_length(chosen, longest)
    enough = all(
        sum(n for n, w in groups if w > width) >= sum(n for n, w in exact if w > width)
        for width in group_widths(longest)[1:]
    )
    assert fits(chosen.sort(descending=True).values, groups) == enough


@pytest.mark.parametrize(
    ("lengths", "groups", "expected"),
    [
        ([9, 4, 1], ((1, 9), (2, 5)), True),
        ([9, 6, 1], ((1, 9), (2, 5)), False),  # the second row is longer than its group is wide
        ([5, 4, 1], ((1, 9), (2, 5)), True),
        ([5, 4], ((1, 9), (2, 5)), False),  # another number of rows
        ([5], ((1, 9), (2, 5)), False),
    ],
)
def test_what_fits(lengths: list[int], groups: LengthGroups, expected: bool) -> None:
    assert fits(torch.tensor(lengths), groups) is expected
