import gzip
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce import memory
from sce.data.interactions import Interactions, Tally, tally_parts
from sce.data.reading import read_interactions
from sce.errors import InputError

HEADER = "user_id,item_id,timestamp\n"
Event = tuple[int | str, int | str, int]


def events(log: Interactions) -> list[Event]:
    users, items = log.user_ids.decode(log.users), log.item_ids.decode(log.items)
    return list(zip(users, items, log.timestamps.tolist(), strict=True))


def same(log: Interactions, other: Interactions) -> bool:
    return (
        np.array_equal(log.users, other.users)
        and np.array_equal(log.items, other.items)
        and np.array_equal(log.timestamps, other.timestamps)
        and log.user_ids == other.user_ids
        and log.item_ids == other.item_ids
    )


def table(rows: int = 400, ids: str = "integers") -> pl.DataFrame:
    random = np.random.default_rng(1)
    frame = pl.DataFrame(
        {
            "user_id": random.integers(1, 40, rows),
            "item_id": random.integers(0, 100, rows),
            "timestamp": 1_600_000_000 + random.integers(0, 50, rows),  # many ties
        }
    )
    if ids == "strings":
        frame = frame.with_columns(pl.format("u{}", "user_id"), pl.format("é-{}", "item_id"))
    return frame


def expected_events(frame: pl.DataFrame, scale: int = 1_000_000) -> list[Event]:
    rows = sorted(frame.rows(), key=lambda row: (row[0], row[2]))  # stable: ties keep their order
    return [(user, item, time * scale) for user, item, time in rows]


def write(frame: pl.DataFrame, path: Path) -> Path:
    """Write a table in the format and compression that the name tells."""
    kind, _, compression = path.name.partition(".")[2].partition(".")
    if kind in ("csv", "tsv"):
        data = frame.write_csv(separator="\t" if kind == "tsv" else ",").encode()
    elif kind in ("jsonl", "json", "ndjson"):
        data = frame.write_ndjson().encode()
    else:
        frame.write_parquet(path)
        return path
    if compression == "zst":
        lines = pl.DataFrame({"": data.decode().splitlines()})
        lines.write_csv(path, include_header=False, quote_style="never", compression="zstd")
        assert path.read_bytes()[:4] == b"\x28\xb5\x2f\xfd"
    else:
        path.write_bytes(gzip.compress(data) if compression == "gz" else data)
    return path


FILES = [
    *(f"log.{kind}{end}" for kind in ("csv", "tsv", "jsonl") for end in ("", ".gz", ".zst")),
    "log.json",
    "log.ndjson.gz",
    "log.parquet",
]


@pytest.mark.parametrize("ids", ["integers", "strings"])
@pytest.mark.parametrize("name", FILES)
def test_every_format_and_compression(name: str, ids: str, tmp_path: Path) -> None:
    frame = table(ids=ids)
    log = read_interactions(write(frame, tmp_path / name))
    assert events(log) == expected_events(frame)
    assert log.users.dtype == log.items.dtype == np.int32
    assert log.timestamps.dtype == np.int64
    assert log.user_ids.kind == log.item_ids.kind == ids.removesuffix("s")
    assert log.dropped == 0


def test_three_files_differently_compressed_equal_one(tmp_path: Path) -> None:
    frame = table()
    whole = read_interactions(write(frame, tmp_path / "whole.csv"))
    parts = [
        write(frame[:150], tmp_path / "a.csv.zst"),
        write(frame[150:200], tmp_path / "b.csv.gz"),
        write(frame[200:], tmp_path / "c.csv"),
    ]
    assert same(read_interactions(parts), whole)
    assert same(read_interactions(str(tmp_path / "?.csv*")), whole)
    # In another order the ties come in another order.
    assert not same(read_interactions(parts[::-1]), whole)


def test_files_of_different_formats_are_one_log(tmp_path: Path) -> None:
    frame = table(ids="strings")
    parts = [
        write(frame[:100], tmp_path / "z.parquet"),
        write(frame[100:250], tmp_path / "b.jsonl"),
        write(frame[250:], tmp_path / "a.tsv.gz"),
    ]
    assert events(read_interactions(parts)) == expected_events(frame)


def test_a_pattern_is_expanded_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name, item in [("deep/b.csv", 2), ("deep/a.csv", 1), ("c.csv", 0)]:
        (tmp_path / name).write_text(HEADER + f"7,{item},5\n")
    assert read_interactions(str(tmp_path / "**" / "*.csv")).items.tolist() == [0, 1, 2]
    log = read_interactions(
        [tmp_path / "deep/b.csv", str(tmp_path / "deep/a*"), tmp_path / "c.csv"]
    )
    assert log.item_ids.decode(log.items) == [2, 1, 0]


@pytest.mark.parametrize("name", ["log[1].csv", "log*.jsonl", "log?.parquet"])
def test_a_name_that_looks_like_a_pattern(name: str, tmp_path: Path) -> None:
    frame = table(30)
    path = write(frame, tmp_path / name)
    write(frame, tmp_path / f"log1{path.suffix}")
    assert len(read_interactions(path)) == 30


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz", "log.jsonl", "log.parquet"])
def test_ties_keep_the_order_of_the_input(name: str, tmp_path: Path) -> None:
    rows = 60_000  # more than one batch of any reader
    frame = pl.DataFrame(
        {"user_id": np.arange(rows) % 7, "item_id": np.arange(rows)[::-1], "timestamp": [5] * rows}
    )
    log = read_interactions(write(frame, tmp_path / name))
    assert log.items.tolist() == [
        rows - 1 - row for user in range(7) for row in range(user, rows, 7)
    ]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), ids=st.sampled_from(["integers", "strings", "far"]))
def test_the_order_of_rows_does_not_matter_when_times_differ(
    data: st.DataObject, ids: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    numbers = st.integers(0, 9) if ids != "far" else st.sampled_from([-(2**62), 5, 2**62])
    pairs = data.draw(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=30))
    prefix = "x" if ids == "strings" else ""
    lines = [f"{prefix}{user},{prefix}{item},{9 * n}\n" for n, (user, item) in enumerate(pairs)]
    shuffled = data.draw(st.permutations(lines))
    folder = tmp_path_factory.mktemp("order")
    (folder / "a.csv").write_text(HEADER + "".join(lines))
    (folder / "b.csv").write_text(HEADER + "".join(shuffled))
    log = read_interactions(folder / "a.csv")
    assert same(read_interactions(folder / "b.csv"), log)
    by_hand = sorted((user, 9 * n, item) for n, (user, item) in enumerate(pairs))
    wanted = [(f"{prefix}{user}", f"{prefix}{item}", n * 1_000_000) for user, n, item in by_hand]
    assert [(str(user), str(item), time) for user, item, time in events(log)] == wanted


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_only_the_columns_that_matter_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [pl.lit("much text").alias(f"text {number}") for number in range(6)]
    path = write(table(30).with_columns(others), tmp_path / name)
    plans: list[str] = []
    collect = pl.LazyFrame.collect

    def spy(self: pl.LazyFrame, *args: Any, **kwargs: Any) -> Any:
        plans.append(self.explain())
        return collect(self, *args, **kwargs)

    monkeypatch.setattr(pl.LazyFrame, "collect", spy)
    assert len(read_interactions(path)) == 30
    scans = [plan for plan in plans if "SCAN" in plan.upper() and "len()" not in plan]
    assert scans
    # Of a csv file one more is read, which betrays rows that are too long.
    width = {"log.csv": "4/10", "log.jsonl": r"(\*|3)/3", "log.parquet": "3/9"}[name]
    assert all(re.search(f"PROJECT {width} COLUMNS", plan) for plan in scans)


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz", "log.jsonl", "log.parquet"])
def test_more_rows_than_memory_holds_are_refused_before_they_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(table(20_000), tmp_path / name)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 400 kB\n")
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    needs = r"^preparing [12]\d,\d\d\d rows of .* needs about .* of memory, and 400 KiB is free"
    with pytest.raises(InputError, match=needs):
        read_interactions(path)
    with pytest.raises(InputError, match=r"^encoding the ids of 20,000 rows needs about 1\.1"):
        read_interactions(table(20_000))


def test_columns_by_option(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("who,what,when,user_id\n1,2,3,4\n")
    log = read_interactions(path, user_column="who", item_column="what", time_column="when")
    assert events(log) == [(1, 2, 3_000_000)]


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        ("abc,1,5000", "string"),
        ("007,1,5000", "string"),  # and not the same as 7
        ("18446744073709551615,1,5000", "string"),
        ("-7,1,5000", "integer"),
    ],
)
def test_ids_that_change_their_looks_late_in_the_file(
    late: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "log.csv"
    path.write_text(HEADER + "".join(f"{n % 50},1,{n}\n" for n in range(3000)) + late + "\n")
    log = read_interactions(path)
    assert log.user_ids.kind == expected
    assert log.user_ids.lookup([late.split(",")[0], "49"]).min() >= 0
    assert tally_parts("all", [log]) == Tally("all", 51, 1, 3001)


def test_integers_in_one_file_and_strings_in_another(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(HEADER + "10,1,1\n9,1,2\n")
    (tmp_path / "b.csv").write_text(HEADER + "x,1,3.5\n")
    log = read_interactions([tmp_path / "a.csv", tmp_path / "b.csv"])
    assert events(log) == [("10", 1, 1_000_000), ("9", 1, 2_000_000), ("x", 1, 3_500_000)]


def test_json_keeps_the_difference_of_numbers_and_strings(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"user": "5", "item": 6, "time": "2020-01-01T00:00:00Z", "x": {"y": [1]}}\n')
    assert events(read_interactions(path)) == [("5", 6, 1_577_836_800_000_000)]


def test_json_types_that_change_late_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    line = '{"user": 5, "item": 6, "time": 7}\n'
    path.write_text(line * 3000 + '{"time": 8.5, "user": "x", "item": 18446744073709551615}\n')
    log = read_interactions(path)
    assert (log.user_ids.kind, log.item_ids.kind) == ("string", "string")
    assert events(log)[-1] == ("x", "18446744073709551615", 8_500_000)


def test_parquet_with_dates_and_categories(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "User": pl.Series(["b", "a"], dtype=pl.Categorical),
            "Item": pl.Series([2**64 - 1, 3], dtype=pl.UInt64),
            "Date": [datetime(2020, 1, 1), datetime(1969, 12, 31)],
        }
    )
    log = read_interactions(write(frame, tmp_path / "log.parquet"))
    assert events(log) == [
        ("a", "3", -86_400_000_000),
        ("b", "18446744073709551615", 1_577_836_800_000_000),
    ]


def test_windows_line_ends_a_byte_order_mark_and_no_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes("\ufeffuser_id,item_id,timestamp\r\n1,2,3\r\n4,5,6".encode())
    assert events(read_interactions(path)) == [(1, 2, 3_000_000), (4, 5, 6_000_000)]


def test_counts(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(HEADER + "1,2,3\n1,2,4\n5,2,1\n5,9,2\n5,2,3\n8,2,1\n")
    log = read_interactions(path)
    assert tally_parts("all", [log]) == Tally("all", 3, 2, 6)
    assert tally_parts("some", [log.where(log.users == 1)]) == Tally("some", 1, 2, 3)
    assert tally_parts("none", [log.where(log.users == 9)]) == Tally("none", 0, 0, 0)


def test_every_step_is_told(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(HEADER + "1,2,3\n")
    told: list[str] = []
    read_interactions(str(tmp_path / "*.csv"), report=told.append)
    assert [line.replace(str(tmp_path), "") for line in told] == [
        "reading /a.csv, 32 B (1 of 2)",
        "reading /b.csv, 32 B (2 of 2)",
        "encoding the ids of 2 rows",
        "sorting 2 rows by user and time",
    ]


def test_interactions_are_known_without_polars() -> None:
    code = "import sys, sce.data.interactions; sys.exit('polars' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("library", [pd, pl])
def test_a_data_frame_is_read_as_a_file_is(library: Any, tmp_path: Path) -> None:
    frame = table(ids="strings").with_columns(pl.from_epoch("timestamp"))
    given = library.DataFrame({name: frame[name].to_list() for name in frame.columns})
    assert same(read_interactions(given), read_interactions(write(frame, tmp_path / "a.parquet")))
    assert len(read_interactions(frame.lazy())) == 400


def test_columns_of_pandas_of_every_kind() -> None:
    times = pd.to_datetime(["2020-01-01", "2020-01-02", None]).tz_localize("Europe/Berlin")
    frame = pd.DataFrame(
        {
            "user": pd.array([2**60 + 1, 5, None], dtype="Int64"),
            "item": ["a", None, "b"],
            "ts": times,
        }
    )
    with pytest.raises(InputError, match=r"the data frame, row 2: no item, .*; 2 rows"):
        read_interactions(frame)
    log = read_interactions(frame, drop_incomplete=True)
    assert (events(log), log.dropped) == ([(2**60 + 1, "a", 1_577_833_200_000_000)], 2)
    with pytest.raises(InputError, match="the data frame, column 'item'"):
        read_interactions(frame.assign(user=1, ts=1, item=pd.Series([1, "b", 2], dtype=object)))
    with pytest.raises(InputError, match=r"expected files or a data frame .*; got int"):
        read_interactions(5)
