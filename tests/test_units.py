import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.errors import InputError
from sce.units import (
    parse_duration,
    parse_size,
    show_count,
    show_digits,
    show_duration,
    show_memory,
    show_metric,
    show_share,
    show_size,
)

ALL = [show_count, show_digits, show_duration, show_memory, show_metric, show_share]


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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1.5m", 90), ("10 min", 600), ("1h30m", 5400), ("1d", 86_400)],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "10 weeks", "-5m", "0s", "5", "1h30", "5m!", "1..2s", "m"]
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(InputError, match="like 90s, 10m or 1h30m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GB", 16 * 10**9),
        ("16 GiB", 16 * 2**30),
        ("16gib", 16 * 2**30),
        ("16G", 16 * 2**30),
        ("900 MB", 9 * 10**8),
        ("1.5TiB", 3 * 2**39),
        (".5 kb", 500),
        ("1_000_000", 10**6),
        ("1,000 B", 1000),
        ("12,500.5 kB", 12_500_500),
        (" 80GB ", 80 * 10**9),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "16 XB",
        "-1GB",
        "16GB GB",
        "sixteen",
        "1.2.3GB",
        "0GB",
        "9" * 400,
        "1e9GB",
        "1,5GB",
        "1_5GB",
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match="memory"):
        parse_size(text)


def test_a_number_without_a_unit_that_nobody_means() -> None:
    with pytest.raises(InputError, match=r"16 bytes are meant\? Give a unit, such as 16GB"):
        parse_size("16")


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 10**15))
def test_a_size_is_shown_within_its_three_digits(size: int) -> None:
    shown = show_size(size)
    assert abs(parse_size(shown) - size) <= 0.006 * size + 1
    assert len([c for c in shown if c.isdigit()]) <= 4
