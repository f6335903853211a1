import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.errors import InputError
from sce.planning import parse_size, show_size


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
        (" 80GB ", 80 * 10**9),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "16 XB", "-1GB", "16GB GB", "sixteen", "1.2.3GB", "0GB"]
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
