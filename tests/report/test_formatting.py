import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.report.formatting import (
    show_compact,
    show_count,
    show_digits,
    show_duration,
    show_factor,
    show_memory,
    show_metric,
    show_share,
)

ALL = [
    show_compact,
    show_count,
    show_digits,
    show_duration,
    show_memory,
    show_metric,
    show_share,
]


@pytest.mark.parametrize("show", ALL, ids=lambda show: show.__name__)
def test_what_is_no_number_is_a_dash(show: Callable[[float | None], str]) -> None:
    assert show(None) == show(math.nan) == show(math.inf) == "–"


@pytest.mark.parametrize("show", ALL, ids=lambda show: show.__name__)
def test_zero_is_short(show: Callable[[float | None], str]) -> None:
    assert show(0).rstrip(" msMiB%.0") == ""


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-9, 1e15))
def test_three_digits_are_within_half_a_percent(value: float) -> None:
    assert float(show_digits(value).replace(",", "")) == pytest.approx(value, rel=0.00501)
    units = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    text = show_compact(value)
    number = float(text.rstrip("kMBT").replace(",", "")) * units.get(text[-1], 1)
    assert number == pytest.approx(value, rel=0.00501)


@pytest.mark.parametrize(
    ("value", "text"),
    [(999.4, "999 MiB"), (999.6, "0.976 GiB"), (1024, "1 GiB"), (141 * 1024, "141 GiB")],
)
def test_memory(value: float, text: str) -> None:
    assert show_memory(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9996, "1 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (86_399.7, "1 d 0 h"),
    ],
)
def test_durations_at_the_edges(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text


def test_a_factor_needs_something_to_compare_with() -> None:
    assert show_factor(0.2, None) is None
    assert show_factor(None, 0.2) is None
    assert show_factor(0.1, 0.2) == "0.5×"
