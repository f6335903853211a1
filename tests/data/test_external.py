import shutil
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.cli import main
from sce.data import external, order, survey
from sce.data import prepare as prepare_module
from sce.data.prepare import prepare
from sce.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore::sce.data.prepare.PrepareWarning")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"preset": "paper", "min_item_users": 2, "min_user_items": 2},
    {"min_item_users": 2, "min_user_items": 3, "iterate": True, "quantile": 0.9},
    {"test_history": "full", "quantile": 0.7, "drop_repeats": True},
    {"split": "leave-one-out", "ties": "shuffle", "seed": 3},
    {"order": "rows", "drop_repeats": True, "min_user_items": 2},
    {"split": "none", "min_item_users": 2, "min_user_items": 2},
]
Write = Callable[[pl.DataFrame, Path], list[str]]


def as_csv(frame: pl.DataFrame, path: Path) -> list[str]:
    frame.write_csv(path / "log.csv")
    return [str(path / "log.csv")]


def as_parquet(frame: pl.DataFrame, path: Path) -> list[str]:
    frame.write_parquet(path / "log.parquet", row_group_size=7)
    return [str(path / "log.parquet")]


def as_partitions(frame: pl.DataFrame, path: Path) -> list[str]:
    """What Spark leaves: two partitions of files, and files of its own."""
    folder = path / "parts.parquet"
    step = max(11, frame.height // 5)
    for number, place in enumerate(range(0, max(1, frame.height), step)):
        inside = folder / f"half={number // 3}"
        inside.mkdir(parents=True, exist_ok=True)
        frame[place : place + step].write_parquet(inside / f"part-{number:05}.snappy.parquet")
    (folder / "_SUCCESS").touch()
    (folder / "half=0" / ".part-00000.snappy.parquet.crc").touch()
    (folder / "_temporary").mkdir()
    frame.write_parquet(folder / "_temporary" / "part-00000.parquet")
    return [str(folder)]


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def prepared(source: Sequence[str], out: Path, **options: Any) -> dict[str, bytes] | str:
    """Every byte of the dataset, or the error's sentence."""
    try:
        return contents(prepare(source, out, **options).path)
    except InputError as error:
        assert not out.exists()
        return str(error).replace("at least ", "")


def assert_same(
    frame: pl.DataFrame, write: Write, n_parts: int, options: dict[str, Any]
) -> dict[str, bytes] | str:
    """One dataset from one log, prepared in memory and in parts."""
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        path = Path(name)
        patch.setattr(external, "_count_parts", lambda *_: n_parts)
        patch.setattr(external, "_BATCH_ROWS", 50)
        patch.setattr(order, "_EVENTS", 20)  # so that a sample of the users is looked at
        source = write(frame, path)
        partitions = Path(source[0]).is_dir()
        files = sorted(map(str, Path(source[0]).glob("half=*/*.parquet"))) or source
        expected = prepared(files, path / "whole", **options)
        found = prepared(source, path / "in parts", memory="1GB", partitions=partitions, **options)
        assert found == expected
        left = {entry.name for entry in path.iterdir() if entry.name.startswith(".")}
        assert not left
        return found


rows = st.tuples(st.integers(-4, 20), st.integers(0, 12), st.integers(0, 9))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(rows, min_size=1, max_size=150),
    st.sampled_from(["integer", "text", "both"]),
    st.sampled_from([as_csv, as_parquet, as_partitions]),
    st.sampled_from([1, 7, 32]),
    st.sampled_from(OPTIONS),
)
def test_parts_give_the_dataset_of_the_whole(
    log: list[tuple[int, int, int]],
    ids: str,
    write: Write,
    n_parts: int,
    options: dict[str, Any],
) -> None:
    frame = pl.DataFrame(log, ["user_id", "item_id", "timestamp"], orient="row")
    if ids != "integer":
        text = {
            name: pl.format(form, pl.col(name))
            for name, form in [("user_id", "ü{}"), ("item_id", "{}")]
        }
        some = pl.col("user_id") > (10 if ids == "both" else -9)
        frame = frame.with_columns(
            pl.when(some).then(form).otherwise(pl.col(name).cast(pl.String)).alias(name)
            for name, form in text.items()
        )
    assert_same(frame, write, n_parts, options)


RANDOM = np.random.default_rng(0)
USERS, TIMES = (
    np.repeat(np.arange(40), 10),
    np.repeat(np.arange(40), 10) + RANDOM.integers(0, 9, 400),
)
ITEMS = RANDOM.integers(0, 9, 400)
FRAME = pl.DataFrame({"user_id": USERS, "item_id": ITEMS, "timestamp": TIMES})
MOMENT = datetime(2020, 5, 17)


@pytest.mark.parametrize(
    ("n_parts", "options"), list(zip([1, 7, 32, 7, 32, 7, 32], OPTIONS, strict=True))
)
def test_options(n_parts: int, options: dict[str, Any]) -> None:
    assert isinstance(assert_same(FRAME, as_partitions, n_parts, options), dict)


def late(value: Any, common: Any) -> list[Any]:
    """A column whose last value differs from those of the batches before it."""
    return [*common[:-1], value]


VALUES: dict[str, dict[str, Any]] = {
    "an item that is text": {"item_id": late("x", ITEMS.astype(str))},
    "users written as fractions": {"user_id": [f"{user}.0" for user in USERS]},
    "two ways to write a user": {
        "user_id": late("7.0", [f"u{user}" if user != 7 else "7" for user in USERS])
    },
    "an item like another": {"item_id": late("3.0", ["x", *ITEMS.astype(str)[1:]])},
    "far apart": {"item_id": ITEMS * 10**12, "user_id": USERS * -(10**15)},
    "unsigned": {"user_id": pl.Series(late(2**64 - 1, USERS.tolist()), dtype=pl.UInt64)},
    "seconds with a fraction": {"timestamp": late(80.25, TIMES.astype(float))},
    "dates": {"timestamp": [MOMENT + timedelta(microseconds=int(time)) for time in TIMES]},
    "days": {"timestamp": [(MOMENT + timedelta(days=int(time))).date() for time in TIMES]},
    "text with nanoseconds": {
        "timestamp": late(
            "2020-05-17 01:00:00.123456789", [f"2020-05-17 00:00:{t:02}" for t in TIMES]
        )
    },
    "text that nanoseconds do not reach": {
        "timestamp": late(
            "2020-05-17 01:00:00.123456789", ["3000-01-01 00:00:00", *["2020-05-17 00:00:01"] * 399]
        )
    },
    "nanoseconds": {"timestamp": 1_600_000_000_000_000_000 + TIMES},
    "times beyond 64 bits": {"timestamp": late(2.0**70, TIMES.astype(float))},
    "one user has most": {"user_id": np.where(TIMES < 45, 5, USERS)},
    "bytes": {"user_id": [f"{user}".encode() for user in USERS]},
    "rows without a user": {"user_id": late(None, USERS.tolist())},
    "an unreadable time": {"timestamp": late("yesterday", TIMES.astype(str))},
}


def test_times_of_two_kinds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "_BATCH_ROWS", 50)
    times = pl.Series(["2020-05-17"] * 200 + ["1600000000"] * 200)
    source = as_csv(FRAME.with_columns(timestamp=times), tmp_path)
    assert "log.csv: times are numbers in some rows and dates" in fail(
        source, tmp_path, memory="1GB", drop_incomplete=True
    )


@pytest.mark.parametrize("write", [as_csv, as_partitions])
@pytest.mark.parametrize("name", VALUES)
def test_values(name: str, write: Write) -> None:
    frame = FRAME.with_columns(**{name: pl.Series(column) for name, column in VALUES[name].items()})
    if name == "bytes" and write is as_csv:
        pytest.skip("csv has none")
    every: list[dict[str, Any]] = [{}, {"drop_incomplete": True}]
    for options in every if write is as_csv else every[:1]:
        assert_same(frame, write, 7, options)


def test_files_of_several_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "_BATCH_ROWS", 50)
    half = FRAME[200:].with_columns(pl.format("u{}", "user_id").alias("user_id"))
    FRAME[:200].write_parquet(tmp_path / "1.parquet")
    half.write_csv(tmp_path / "2.csv")
    FRAME[:0].write_parquet(tmp_path / "3.parquet")
    files = [str(tmp_path / name) for name in ("1.parquet", "2.csv", "3.parquet")]
    found = prepare(files, tmp_path / "parts", memory="1GB")
    assert found.content_hash == prepare(files, tmp_path / "whole").content_hash


def test_parts_are_of_about_one_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "_count_parts", lambda *_: 10)
    monkeypatch.setattr(survey, "_SAMPLE_USERS", 500)
    users = RANDOM.permutation(np.repeat(np.arange(3000), 10))
    frame = pl.DataFrame({"user_id": users, "item_id": users % 7, "timestamp": users})
    source = as_parquet(frame, tmp_path)
    (tmp_path / "parts").mkdir()
    log, _ = external.read_parts(source, tmp_path / "parts", 10**9)
    assert [len(part.user_ids) for part in log] == [len(np.unique(part.users)) for part in log]
    assert max(map(len, log)) < 2 * len(users) / len(log)
    assert isinstance(next(iter(log)).items.base, np.memmap)


@pytest.mark.parametrize("memory", [7 * 10**8, 4 * 10**9, 10**12])
def test_the_number_of_parts_follows_from_memory(memory: int) -> None:
    ids = pl.Series(np.arange(1000))
    found = external._count_parts(200_000_000, ids, ids, memory)
    assert found == {7 * 10**8: 126, 4 * 10**9: 7, 10**12: 1}[memory]
    with pytest.raises(InputError, match="1,000 items and the program itself take 610 MiB"):
        external._count_parts(200_000_000, ids, ids, 10**8)


@pytest.mark.parametrize(
    ("memory", "free", "message"),
    [
        ("500MB", None, "the program itself takes 610 MiB; give memory at least that"),
        ("700MB", 6 * 10**8, "memory of 668 MiB is more than the 572 MiB free here; free some"),
        ("4GB", 10**9, "memory of 3.73 GiB is more than the 954 MiB free here; give it less, "
         "at least 610 MiB, free some, or use a machine that has more"),
    ],
)  # fmt: skip
def test_an_amount_that_is_not_free_is_refused_before_anything_is_read(
    memory: str, free: int | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(external, "free_memory", lambda: free)
    monkeypatch.setattr(external, "survey_file", None)
    assert fail(as_parquet(FRAME, tmp_path), tmp_path, memory=memory).startswith(message)


def test_partitions_are_read_within_half_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "free_memory", lambda: 10**9)
    source = as_partitions(FRAME, tmp_path)
    assert "program itself takes 610 MiB" in fail(source, tmp_path, partitions=True)


def fail(source: Sequence[str], tmp_path: Path, **options: Any) -> str:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError) as error:
        prepare(source, tmp_path / "out", **options)
    assert sorted(tmp_path.rglob("*")) == before
    return str(error.value)


def test_what_cannot_be_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    FRAME.write_ndjson(tmp_path / "log.jsonl")
    (source,) = as_parquet(FRAME, tmp_path)
    assert "is no directory" in fail([source], tmp_path, partitions=True)
    assert "memory is an amount such as" in fail([source], tmp_path, memory="")
    assert "no file that ends with .parquet" in fail(
        [str(tmp_path / "empty")], tmp_path, partitions=True
    )
    assert "convert it to Parquet" in fail([str(tmp_path / "log.jsonl")], tmp_path, memory="1GB")
    with pytest.raises(InputError, match="is in memory already"):
        prepare(FRAME, tmp_path / "out", memory="1GB")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 9))
    assert "needs about 15.6 KiB of disk beside the output, and 9 B is free" in fail(
        [source], tmp_path, memory="1GB"
    )


@pytest.mark.parametrize(
    "step", ["reading", "dividing", "sorting", "filtering", "splitting", "writing"]
)
def test_interrupted_it_leaves_nothing(step: str, tmp_path: Path) -> None:
    def report(text: str) -> None:
        if text.startswith(step):
            raise KeyboardInterrupt

    source = as_parquet(FRAME, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "data" / "out", memory="1GB", report=report)
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.parquet"]


@pytest.mark.parametrize("at_once", [1, 50, 10**6])
def test_repeated_targets_are_counted_in_pieces(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "_EVENTS_AT_ONCE", at_once)
    test = prepare(FRAME, tmp_path / "data", split="leave-one-out").test
    assert len(test) == 40
    lists = [test[row].tolist() for row in range(len(test))]
    expected = sum(items[-1] in items[:-1] for items in lists)
    assert 0 < expected < 40
    assert prepare_module._targets_had_before(test) == expected


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = as_partitions(FRAME, tmp_path)
    assert main(["prepare", "--partitions", source, "--out", str(tmp_path / "out")]) == 0
    assert (
        main(
            [
                "prepare",
                "--memory",
                "1GB",
                f"{source}/half=*/*.parquet",
                "--out",
                str(tmp_path / "two"),
            ]
        )
        == 0
    )
    assert contents(tmp_path / "out") == contents(tmp_path / "two")
    assert main(["prepare", "--memory", "lots", source, "--out", str(tmp_path / "three")]) == 2
    assert "memory is an amount such as 16GB" in capsys.readouterr().err
