"""Bad input: each kind is refused in words that name the file, the place and the remedy."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from sce.data.reading import read_interactions
from sce.errors import InputError

HEADER = "user_id,item_id,timestamp\n"
Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path) -> Refused:
    """Writes a file and gives the message with which it is refused, without the folder."""

    def refused(name: str, content: str | bytes, **options: str) -> str:
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError) as caught:
            read_interactions(tmp_path / name, **options)  # type: ignore[arg-type]
        message = str(caught.value)
        assert "\n" not in message
        return message.replace(f"{tmp_path}/", "")

    return refused


def zstd(text: str, path: Path) -> bytes:
    lines = pl.DataFrame({"": text.splitlines()})
    lines.write_csv(path, include_header=False, quote_style="never", compression="zstd")
    return path.read_bytes()


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (",5,6", "no user, column 'user_id' is empty"),
        ('"",5,6', "no user, column 'user_id' is empty"),
        ("4,,6", "no item, column 'item_id' is empty"),
        ("4,5,", "no time, column 'timestamp' is empty"),
        ("4,5", "no time, column 'timestamp' is empty"),
        ("4,5,soon", "cannot read 'soon' in column 'timestamp' as a time"),
        ("4,5,2020-01-01", "cannot read '2020-01-01' in column 'timestamp' as a time"),
        ("4,5,nan", "cannot read 'nan' in column 'timestamp' as a time"),
    ],
)
def test_a_row_that_lacks_something(row: str, fault: str, refused: Refused) -> None:
    message = refused("a.csv", HEADER + "1,2,3\n4,5,6\n" + row + "\n7,8,9\n" + row + "\n")
    assert message.startswith(f"a.csv, line 4: {fault}; 2 rows ")
    assert "or left out with drop_incomplete=True" in message
    assert message.endswith("2020-03-31 23:59:59") == (" as a time" in fault)


@pytest.mark.parametrize(
    "time",
    ["03.03.2020 12:12", "03/04/2020", "Mar 3, 2020", "31/03/20", "31-03-20 10:00:00", "1/2/20"],
)
def test_times_of_another_format(time: str, refused: Refused) -> None:
    message = refused("a.csv", HEADER + f'1,2,"{time}"\n' * 3)
    assert message == (
        f"a.csv, line 2: cannot read {time!r} in column 'timestamp' as a time; 3 rows of it must "
        "be mended or removed; times are all numbers, such as seconds since 1970, or all like "
        "2020-03-31 23:59:59"
    )


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_a_byte_order_mark_and_a_key_that_occurs_twice(
    ending: str, refused: Refused, tmp_path: Path
) -> None:
    line = '\ufeff{"user": 1, "item": 2, "ts": 3}\n'
    twice = line + line[1:].replace("}", ', "item": 5}')

    def data(text: str) -> bytes:
        if ending == ".zst":
            return zstd(text, tmp_path / "x.zst")
        return gzip.compress(text.encode()) if ending else text.encode()

    message = refused(f"a.jsonl{ending}", data(twice))
    assert message == f"a.jsonl{ending}, line 2: the key 'item' occurs twice; remove one"
    (tmp_path / f"b.jsonl{ending}").write_bytes(data(line))
    assert len(read_interactions(tmp_path / f"b.jsonl{ending}")) == 1


@pytest.mark.parametrize("escaped", [r"it\u0065m", r"\u0069tem", r"it\u0065\u006D"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_key_in_two_spellings_occurs_twice(escaped: str, order: int, refused: Refused) -> None:
    one, other = ["item", escaped][::order]
    line = '{"user": 1, "item": 2, "ts": 3, "by": "a \\u2019 \\u0026 \\\\ b"}\n'
    twice = f'{{"user": 1, "{one}": 2, "{other}": 4, "ts": 3}}\n'
    message = refused("a.jsonl", line + twice)
    assert message == "a.jsonl, line 2: the key 'item' occurs twice; remove one"


def test_a_key_in_another_spelling_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"user": 1, "it\\u0065m": 2, "ts": 3}\n' * 3)
    assert len(read_interactions(tmp_path / "a.jsonl")) == 3


ROWS = [{"user": f"ü{n}", "item": n, "ts": n} for n in range(3)]
TEXT = "user,item,ts\n" + "".join(f"{row['user']},{row['item']},{row['ts']}\n" for row in ROWS)
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", json.dumps(ROWS).encode(), r"line 1: .* an array; .* jq -c '\.\[\]'"),
        ("a.json", json.dumps(ROWS, indent=1).encode(), r"line 1: .* an array; .* jq -c '\.\[\]'"),
        ("a.json", json.dumps(ROWS[0], indent=1).encode(), r"line 1: .* whole object: jq -c \."),
        ("a.csv", TEXT.encode("utf-16"), "columns .*UTF-16.* iconv -f UTF-16"),
        ("a.jsonl", LINES.encode("utf-16"), "line 1: .*UTF-16.* iconv -f UTF-16"),
        ("a.csv", TEXT.encode("cp1252"), "line 2: not UTF-8 .* iconv -f WINDOWS-1252"),
        ("a.csv", f"ü{TEXT}".encode("cp1252"), "columns .*not UTF-8.* iconv -f WINDOWS-1252"),
        ("a.jsonl", LINES.encode("cp1252"), "line 1: not UTF-8 .* iconv -f WINDOWS-1252"),
    ],
)
def test_other_encodings_and_arrays_are_said_how_to_convert(
    name: str, content: bytes, message: str, refused: Refused
) -> None:
    assert re.search(message, refused(name, content))


LONG = "x" * 200_000  # beyond what Python's csv takes unless told to
LATE = ":good:" * 200 + "\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            ":header:1,2,3\n,5,6\n",
            "line 3: no user, .*; 1 row of it must be mended",
        ),
        ("a.csv", ":header:1,2,2020-01-01\n1,2,2020-02-30\n", "line 3: cannot read '2020-02-30'"),
        ("a.csv", '\nuser,item,note,ts\n1,2,"two\nlines",3\n\n1,,x,3\n', "line 6: no item"),
        ("a.csv", f"user,item,ts,note\n1,2,3,{LONG}\n1,,3,y\n", "line 3: no item"),
        ("a.csv", f"user,item,ts,note\n1,2,3,{LONG}\n1,2,3,y,z\n", "line 3: 5 fields"),
        ("a.csv", 'user,item,ts,note\n1,2,3,"x"y\n1,,3,y\n', "row 2 after the header: no item"),
        ("a.csv", ":header:1,2,3\n4,5,6,7\n", "line 3: 4 fields where there are 3 columns"),
        ("a.csv", ":header:1,2,3,4\n", "line 2: 4 fields where there are 3 columns"),
        # The comma moves a wrong value below item; only the overflow betrays it.
        ("a.csv", "ts,user,title,item\n1,2,x,3\n4,5,a, b,6\n", "line 3: 5 fields where .* 4"),
        ("a.csv", ':header:1,2,3\n1,"2,3\n4,5,6\n', "line 3: malformed csv from here on"),
        ("a.csv", ":header:", "there are columns, but no rows"),
        (
            "a.csv",
            "1,2,3\n4,5,6\n",
            "no column .*columns are '1', '2', '3' .*header line missing.*user_col",
        ),
        (
            "a.csv",
            "who,item,sku,when\n1,2,3,4\n",
            "no column looks like the user or the time; its columns are 'who', 'item', 'sku', "
            "'when'; name the right ones with user_column and time_column, or take the rows as in "
            "order with order='rows'; the columns 'item', 'sku' could all be the item; choose one "
            "with item_column$",
        ),
        ("a.jsonl", ':good:\n{"user": null, "item": 1, "ts": 5}', "line 3: no user, .*; 1 row"),
        ("a.jsonl", ':good:{"item": "a", "ts": 5}\n', "line 2: no user"),
        ("a.jsonl", ':good:{"user": 2, "item": "a", "ts": "soon"}', "line 2: cannot read 'soon'"),
        ("a.jsonl", "\n\n", "line 2: the end, and no JSON object so far"),
        ("a.jsonl", ':good:{"user": 2, "item": 3, "ts": NaN}', r"line 2: .*\(NaN is no JSON"),
        (
            "a.csv",
            'user,item,ts,size\n1,2,3,x\n1,2,3,5" pipe\n1,2,3,6" pipe\n4,5,6,x\n',
            'line 3: a " without another on its line; inside a field it is doubled',
        ),
        ("a.jsonl", LATE + '{"user": 1, "item":\n:good:', r"line 202: malformed JSON \("),
        ("a.jsonl", LATE + "hello\n:good:", r"line 202: malformed JSON \("),
        (
            "a.jsonl",
            LATE + "[1, 2]\n:good:",
            r"line 202: no JSON object but an array; write a line",
        ),
        (
            "a.csv",
            "user;item;time\n1;2;3\n",
            r"no column .* separated by ';'\? Write it with commas",
        ),
        ("a.xlsx", "PK", "a workbook is not read; save its sheet as csv"),
    ],
)
def test_the_place_and_the_fault_are_named(
    name: str, text: str, message: str, refused: Refused
) -> None:
    good = '{"user": 1, "item": "a", "ts": 5}\n'
    text = text.replace(":header:", HEADER).replace(":good:", good)
    assert re.match(f"{name}[,:] {message}", refused(name, text))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_lines_of_compressed_files(ending: str, refused: Refused, tmp_path: Path) -> None:
    text = HEADER + "1,2,3\n1,2,soon\n"
    data = gzip.compress(text.encode()) if ending == ".gz" else zstd(text, tmp_path / "x.zst")
    assert refused("a.csv" + ending, data).startswith(f"a.csv{ending}, line 3: cannot read 'soon'")


def test_rows_of_parquet(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": [1, None, 3, None], "item": ["a", "b", "", "d"], "ts": [1] * 4})
    frame.write_parquet(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a.parquet, row 2: no user, .*; 3 rows"):
        read_interactions(tmp_path / "a.parquet")
    frame.with_columns(user=1).write_parquet(tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"b.parquet, row 3: no item, .*; 1 row"):
        read_interactions(tmp_path / "b.parquet")


def test_incomplete_rows_may_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(HEADER + "1,2,3\n,5,6\n4,,6\n4,5,soon\n4,5,6\n")
    log = read_interactions(tmp_path / "a.csv", drop_incomplete=True)
    assert (len(log), log.dropped) == (2, 3)


def test_all_rows_incomplete(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(HEADER + ",5,6\n4,,6\n")
    with pytest.raises(InputError, match=r"a.csv: .* all 2 rows lack a user, an item or a time"):
        read_interactions(tmp_path / "a.csv", drop_incomplete=True)


def test_blank_lines_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(HEADER + "1,2,3\n\n4,5,6\n\n\n")
    log = read_interactions(tmp_path / "a.csv")
    assert (len(log), log.user_ids.kind) == (2, "integer")


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet", "a.csv.gz"])
def test_an_empty_file(name: str, refused: Refused) -> None:
    assert refused(name, "") == f"{name}: the file is empty (0 bytes)"


def test_compressed_nothing(refused: Refused) -> None:
    assert refused("a.csv.gz", gzip.compress(b"")) == "a.csv.gz: the file is empty"


def test_a_file_without_rows_among_others(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(HEADER)
    (tmp_path / "b.csv").write_text(HEADER + "1,2,2020-01-01\n")
    assert len(read_interactions(str(tmp_path / "*.csv"))) == 1
    (tmp_path / "b.csv").write_text(HEADER)
    with pytest.raises(InputError, match="all 2 files: there are columns, but no rows"):
        read_interactions(str(tmp_path / "*.csv"))


CLICKS = HEADER + "".join(f"{n % 977},{n * 7919 % 5003},{n}\n" for n in range(20_000))


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        *(("a.csv.gz", kept) for kept in (0.02, 0.5, 0.999, -8, -1)),
        *(("a.csv.zst", kept) for kept in (0.5, 0.999)),
        ("a.jsonl.gz", -20),
    ],
)
def test_a_truncated_file(name: str, kept: float, refused: Refused, tmp_path: Path) -> None:
    lines = "".join(f'{{"user": {n}, "item": {n * 7919}, "ts": {n}}}\n' for n in range(5000))
    text = lines if "json" in name else CLICKS
    gz = name.endswith(".gz")
    data = gzip.compress(text.encode()) if gz else zstd(text, tmp_path / "x.zst")
    message = refused(name, data[: int(kept * len(data)) if kept > 0 else int(kept)])
    what = "gzip" if gz else "zstd"
    assert message.startswith(f"{name}: this {what} file is truncated or corrupt (")


@pytest.mark.parametrize("name", ["a.csv.zst", "a.jsonl.zst"])
def test_zstd_that_begins_with_a_skipped_frame(name: str, refused: Refused, tmp_path: Path) -> None:
    frame = b"\x50\x2a\x4d\x18\x04\0\0\0size"  # as pzstd writes it
    message = refused(name, frame + zstd(CLICKS, tmp_path / "x.zst"))
    assert message.startswith(f"{name}: zstd as pzstd writes it; compress it again")


def test_bytes_that_are_text_in_some_files_alone_are_refused(tmp_path: Path) -> None:
    for name, ids in (("a", [b"ab", b"cd"]), ("b", [b"ab", b"\xff\x00"])):
        frame = pl.DataFrame({"user": ids, "item": [1, 2], "ts": [1, 2]})
        frame.write_parquet(tmp_path / f"{name}.parquet")
    assert read_interactions(tmp_path / "b.parquet").user_ids.decode(range(2)) == ["6162", "ff00"]
    with pytest.raises(InputError, match="user ids are bytes, which are text in some files and"):
        read_interactions(str(tmp_path / "*.parquet"))


def test_a_damaged_gzip_file(refused: Refused) -> None:
    data = bytearray(gzip.compress(CLICKS.encode()))
    data[-6] ^= 1  # in the checksum: all lines are there
    message = refused("a.csv.gz", bytes(data))
    assert message.startswith("a.csv.gz: this gzip file is truncated or corrupt (")


def test_a_truncated_parquet_file(refused: Refused, tmp_path: Path) -> None:
    pl.DataFrame({"user": [1], "item": [2], "ts": [3]}).write_parquet(tmp_path / "x.parquet")
    data = (tmp_path / "x.parquet").read_bytes()
    assert refused("a.parquet", data[:-5]).startswith("a.parquet: no parquet file, or truncated (")


def test_a_separator_behind_every_row_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(HEADER + "1,2,3,\n4,5,6,\n")
    assert len(read_interactions(tmp_path / "a.csv")) == 2


def test_text_that_is_not_utf_8(refused: Refused) -> None:
    message = refused("a.csv", (HEADER + "1,a,3\n2,é,3\n").encode("latin-1"))
    assert message.startswith("a.csv, line 3: not UTF-8 (")


def test_parquet_types_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pl.DataFrame({"user": [1.5], "item": [1], "ts": [1]}).write_parquet(path)
    with pytest.raises(InputError, match=r"column 'user': .*fractions such as 1\.5"):
        read_interactions(path)
    pl.DataFrame({"user": [1], "item": [1], "ts": [True]}).write_parquet(path)
    with pytest.raises(InputError, match="column 'ts': a column of type Boolean holds no times"):
        read_interactions(path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("session,item_id,timestamp\n1,2,3\n", "'user_id' in .*a.csv and 'session' in .*b.csv; "),
        (HEADER + "1,2,2020-01-01\n", "times are numbers .* in .*a.csv and dates in .*b.csv"),
        (HEADER + "1,2,1500000000000\n", "look like s in .*a.csv and .* like ms in .*b.csv"),
    ],
)
def test_files_that_disagree(other: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(HEADER + "1,2,1580000000\n")
    (tmp_path / "b.csv").write_text(other)
    with pytest.raises(InputError, match=message):
        read_interactions(str(tmp_path / "*.csv"))
    (tmp_path / "b.csv").write_text("User Id,ITEMID,TimeStamp\n1,2,1500000000000\n")
    assert len(read_interactions(str(tmp_path / "*.csv"), time_unit="ms")) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("*.csv", r"no file matches the pattern '.*/\*.csv'"),
        ("a.csv", r"a.csv: no such file"),
        ("", r"is a directory; .*\*.csv"),
    ],
)
def test_paths_that_name_no_file(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_interactions(str(tmp_path / name))
    with pytest.raises(InputError, match="no input file"):
        read_interactions([])


def test_a_file_named_twice(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(HEADER + "1,2,3\n")
    with pytest.raises(InputError, match=r"a\.csv is named twice"):
        read_interactions([tmp_path / "a.csv", str(tmp_path / "*.csv")])


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text(HEADER + "1,2,3\n")

    def forbidden(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pl, "scan_csv", forbidden)
    with pytest.raises(InputError, match=r"a.csv: cannot be read: .*Permission denied"):
        read_interactions(tmp_path / "a.csv")


def test_a_column_name_is_no_pattern(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("^u.*$,user2,item,ts\na,b,c,1\n")
    log = read_interactions(file, user_column="^u.*$")
    assert log.user_ids[0] == "a"


def test_one_column_cannot_be_two(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("user_id,item_id,timestamp\n1,2,3\n")
    with pytest.raises(InputError, match="must be different columns; got 'user_id', 'user_id'"):
        read_interactions(file, item_column="user_id")


def test_an_unknown_unit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one of s, ms, us, ns or None; got 'h'"):
        read_interactions(tmp_path / "a.csv", time_unit="h")  # type: ignore[arg-type]


def test_decimals_without_a_fraction_are_integers(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    ids = pl.Series([7, 9]).cast(pl.Decimal(20, 0))
    pl.DataFrame({"user": ids, "item": ids, "time": [1, 2]}).write_parquet(file)
    assert read_interactions(file).user_ids.decode(np.array([0, 1])) == [7, 9]


@pytest.mark.parametrize(
    ("kind", "most"), [(pl.Float16, 2**11), (pl.Float32, 2**24), (pl.Float64, 2**53)]
)
def test_ids_that_a_float_cannot_tell_apart_are_refused(
    kind: pl.DataType, most: int, tmp_path: Path
) -> None:
    file = tmp_path / "a.parquet"
    for item in (most - 1, most):
        items = pl.Series([1, item]).cast(kind)
        pl.DataFrame({"user": [1, 2], "item": items, "time": [1, 2]}).write_parquet(file)
        if item < most:
            assert read_interactions(file).item_ids.decode(np.array([1])) == [item]
        else:
            with pytest.raises(InputError, match="ids must be integers or strings"):
                read_interactions(file)


@pytest.mark.parametrize(
    "digits", ["2025013123", "202501312359", "20250131235959", "20250131235959123"]
)
def test_moments_written_as_numbers_are_no_seconds(digits: str, refused: Refused) -> None:
    message = refused("a.csv", HEADER + f"1,2,{digits}\n3,4,{digits}\n")
    assert f"times such as {digits} look like dates" in message


def test_days_written_as_numbers_are_no_seconds(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("user,item,time\n1,2,20250131\n3,4,20241231\n")
    with pytest.raises(InputError, match=r"times such as 20250131 look like dates, YYYYMMDD"):
        read_interactions(file)
    assert len(read_interactions(file, time_unit="s").users) == 2
    file.write_text("user,item,time\n1,2,20250131\n3,4,20241331\n")  # there is no month 13
    assert len(read_interactions(file).users) == 2


def test_a_log_beyond_memory_is_refused_with_the_way_to_read_it(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sce.memory.free_memory", lambda: 10)
    assert refused("a.csv", HEADER + "1,2,3\n").endswith(
        "and 10 B is free; read it in parts with memory='SIZE', free some, or use a machine that "
        "has more"
    )
