from datetime import UTC, date, datetime, timedelta

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.data.columns import UnitName
from sce.data.values import read_times, to_ticks
from sce.errors import InputError

EPOCH = datetime(1970, 1, 1)


def microseconds(column: pl.Series, unit: UnitName | None = None) -> list[int]:
    ticks = to_ticks(read_times(column), unit)
    result: list[int] = ticks.to_microseconds(ticks.values).tolist()
    return result


def since_epoch(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2018-07-07 22:09:11", datetime(2018, 7, 7, 22, 9, 11)),
        ("2018-07-07T22:09:11", datetime(2018, 7, 7, 22, 9, 11)),
        ("2010-10-19T23:55:27Z", datetime(2010, 10, 19, 23, 55, 27)),
        ("2010/10/19", datetime(2010, 10, 19)),
        ("2010/1/9 23:55", datetime(2010, 1, 9, 23, 55)),
        ("2010/10/19 23:55:27.5", datetime(2010, 10, 19, 23, 55, 27, 500_000)),
        ("2018-07-07T22:09:11.5Z", datetime(2018, 7, 7, 22, 9, 11, 500_000)),
        ("2018-07-07 22:09:11.000001", datetime(2018, 7, 7, 22, 9, 11, 1)),
        ("2018-07-07T22:09:11+02:00", datetime(2018, 7, 7, 20, 9, 11)),
        ("2018-07-07T22:09:11-0530", datetime(2018, 7, 8, 3, 39, 11)),
        ("2018-07-07 22:09:11+02", datetime(2018, 7, 7, 20, 9, 11)),
        ("2019-10-01 00:00:00 UTC", datetime(2019, 10, 1)),
        ("2018-07-07", datetime(2018, 7, 7)),
        ("2018-07-07 22:09", datetime(2018, 7, 7, 22, 9)),
        ("2018-07-07T22:09", datetime(2018, 7, 7, 22, 9)),
        ("2018-07-07T22:09Z", datetime(2018, 7, 7, 22, 9)),
        ("20180707T220911Z", datetime(2018, 7, 7, 22, 9, 11)),
        (" 2018-07-07 ", datetime(2018, 7, 7)),
        ("1969-12-31 23:59:59", datetime(1969, 12, 31, 23, 59, 59)),
    ],
)
def test_iso_8601(text: str, moment: datetime) -> None:
    assert microseconds(pl.Series([text])) == [since_epoch(moment)]


def test_forms_may_be_mixed_in_one_column() -> None:
    column = pl.Series(["2020-01-01", "2020-01-01 00:00:01", "2020-01-01T00:00:02.5Z"])
    start = since_epoch(datetime(2020, 1, 1))
    assert microseconds(column) == [start, start + 1_000_000, start + 2_500_000]


@pytest.mark.parametrize(
    ("numbers", "factor"),
    [
        ([1, 2, 3], 1_000_000),  # an order, no times
        ([978_300_760, 1_700_000_000], 1_000_000),
        ([0, 99_999_999_999], 1_000_000),
        ([5, 100_000_000_000], 1_000),
        ([1_700_000_000_000, 1], 1_000),
        ([-1_700_000_000_000, 1], 1_000),
        ([1_700_000_000_000_000, 1], 1),
    ],
)
@pytest.mark.parametrize("kind", [pl.Int64, pl.Float64, pl.String])
def test_the_largest_number_tells_the_unit_of_all(
    numbers: list[int], factor: int, kind: type[pl.DataType]
) -> None:
    column = pl.Series(numbers).cast(kind)
    assert microseconds(column) == [number * factor for number in numbers]


def test_nanoseconds_are_rounded_down() -> None:
    numbers = [1_700_000_000_000_000_999, -1]
    assert microseconds(pl.Series(numbers)) == [1_700_000_000_000_000, -1]
    assert microseconds(pl.Series([1.7e18, 2000.0])) == [1_700_000_000_000_000, 2]


def test_a_unit_that_is_said_wins() -> None:
    column = pl.Series([1_700_000_000])
    assert microseconds(column, "ms") == [1_700_000_000_000]
    assert microseconds(column, "us") == [1_700_000_000]
    assert microseconds(column, "ns") == [1_700_000]
    assert microseconds(pl.Series(["1.5"]), "ms") == [1_500]


def test_fractions_of_seconds_are_rounded_to_microseconds() -> None:
    column = pl.Series([1_500_000_000.25, 1_500_000_000.000001])
    expected = [1_500_000_000_250_000, 1_500_000_000_000_001]
    assert microseconds(column) == expected
    assert microseconds(column.cast(pl.String)) == expected


@settings(max_examples=30, deadline=None)
@given(st.lists(st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1)), min_size=1))
def test_instants_of_every_type(moments: list[datetime]) -> None:
    expected = [since_epoch(moment) for moment in moments]
    column = pl.Series(moments, dtype=pl.Datetime("us"))
    assert microseconds(column) == expected
    assert microseconds(column.dt.replace_time_zone("UTC")) == expected
    zoned = column.dt.replace_time_zone("UTC").dt.convert_time_zone("Asia/Tokyo")
    assert microseconds(zoned) == expected
    assert microseconds(column.cast(pl.Datetime("ns"))) == expected
    assert microseconds(pl.Series([moment.isoformat() for moment in moments])) == expected


def test_dates() -> None:
    days = [date(2020, 1, 1), date(1969, 12, 31)]
    expected = [since_epoch(datetime(2020, 1, 1)), -86_400_000_000]
    assert microseconds(pl.Series(days)) == expected
    assert to_ticks(read_times(pl.Series(days))).unit == "s"


def test_nanoseconds_below_a_microsecond_keep_their_order_in_the_ticks() -> None:
    column = pl.Series([1, 2], dtype=pl.Int64).cast(pl.Datetime("ns"))
    ticks = to_ticks(read_times(column))
    assert ticks.values.tolist() == [1, 2]
    assert ticks.to_microseconds(ticks.values).tolist() == [0, 0]


def test_nanoseconds_in_text_keep_their_order_where_64_bits_hold_them() -> None:
    texts = ["2024-01-01 00:00:00.000000900", "2024-01-01 00:00:00.000000100", "2024-01-02"]
    ticks = to_ticks(read_times(pl.Series(texts)))
    assert ticks.unit == "ns"
    assert (ticks.values - ticks.values[1]).tolist() == [800, 0, 86_400_000_000_000 - 100]
    old = to_ticks(read_times(pl.Series(["1500-01-01 00:00:00.000001900", texts[0]])))
    assert old.unit == "us"
    assert old.values[0] < 0 < old.values[1]
    coarse = to_ticks(read_times(pl.Series(["2024-01-01T00:00:00.000009+00:00"])))
    assert coarse.unit == "us"


def test_what_is_no_time_becomes_null() -> None:
    assert read_times(pl.Series(["5", "x", "7"])).to_list() == [5, None, 7]
    read = read_times(pl.Series(["2020-01-01", "5", "2020-02-30", "2020-01-03"]))
    assert read.is_null().to_list() == [False, True, True, False]
    assert read_times(pl.Series([1.5, float("nan"), float("inf")])).null_count() == 2
    assert read_times(pl.Series([None, None])).null_count() == 2


@pytest.mark.parametrize("column", [pl.Series([True]), pl.Series([timedelta(1)])])
def test_types_that_hold_no_times(column: pl.Series) -> None:
    with pytest.raises(TypeError, match="holds no times"):
        read_times(column)


def test_a_unit_for_dates_is_refused() -> None:
    column = pl.Series([datetime(2020, 1, 1, tzinfo=UTC)])
    with pytest.raises(InputError, match=r"dates, yet time_unit='s'"):
        to_ticks(read_times(column), "s")


@pytest.mark.parametrize("number", [1_600_000_000_000_000, -1_600_000_000_000_000])
def test_numbers_too_large_for_their_unit_are_refused(number: int) -> None:
    with pytest.raises(InputError, match=f"time {number} in the unit s .*time_unit"):
        to_ticks(pl.Series([number, 0]), "s")
