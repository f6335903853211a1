import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.data.parts import Parts, fits, part_widths, parts_for_all, parts_of, shares_longer

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def rows_and_positions(parts: Parts) -> tuple[int, int]:
    return sum(rows for rows, _ in parts), sum(rows * width for rows, width in parts)


@given(lengths=LENGTHS)
def test_each_row_is_in_the_narrowest_part_that_holds_it(lengths: list[int]) -> None:
    longest = max(lengths)
    parts = parts_of(torch.tensor(lengths), longest)
    of_rows = [width for rows, width in parts for _ in range(rows)]
    widths = part_widths(longest)
    in_order = sorted(lengths, reverse=True)
    assert of_rows == [min(w for w in widths if w >= length) for length in in_order]
    assert all(rows > 0 for rows, _ in parts)
    assert fits(torch.tensor(in_order), parts)


def test_a_batch_of_equal_rows_is_one_part() -> None:
    assert parts_of(torch.tensor([7, 7, 7]), 7) == ((3, 7),)
    assert parts_of(torch.tensor([0, 0]), 1) == ((2, 1),)
    assert parts_for_all([1.0, 1.0, 1.0], 64, 200) == ((64, 200),)


def binomial_tail(rows: int, share: float, beyond: int) -> float:
    """The probability of more than `beyond` of so many rows, term by term."""
    return math.fsum(
        math.comb(rows, k) * share**k * (1 - share) ** (rows - k)
        for k in range(beyond + 1, rows + 1)
    )


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 400), share=st.floats(0, 1))
def test_hardly_a_batch_has_more_long_rows_than_parts_have_room_for(
    rows: int, share: float
) -> None:
    parts = parts_for_all([share], rows, 2)  # widths of 2 and 1
    assert rows_and_positions(parts)[0] == rows
    wide = sum(n for n, width in parts if width == 2)
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
    parts = parts_for_all(shares, rows, longest, among=len(every))
    assert rows_and_positions(parts)[0] == rows
    assert rows_and_positions(parts)[1] <= rows * longest
    if rows == len(lengths):  # the one batch there is needs no more than itself
        assert parts == parts_of(every, longest)
    chosen = every[torch.tensor(data.draw(st.permutations(range(len(lengths))))[:rows])]
    exact = parts_of(chosen, longest)
    enough = all(
        sum(n for n, w in parts if w > width) >= sum(n for n, w in exact if w > width)
        for width in part_widths(longest)[1:]
    )
    assert fits(chosen.sort(descending=True).values, parts) == enough


@pytest.mark.parametrize(
    ("lengths", "parts", "expected"),
    [
        ([9, 4, 1], ((1, 9), (2, 5)), True),
        ([9, 6, 1], ((1, 9), (2, 5)), False),  # the second row is longer than its part is wide
        ([5, 4, 1], ((1, 9), (2, 5)), True),
        ([5, 4], ((1, 9), (2, 5)), False),  # another number of rows
        ([5], ((1, 9), (2, 5)), False),
    ],
)
def test_what_fits(lengths: list[int], parts: Parts, expected: bool) -> None:
    assert fits(torch.tensor(lengths), parts) is expected
