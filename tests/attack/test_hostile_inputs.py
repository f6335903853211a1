"""Hostile inputs to `sce prepare`: each is answered rightly, or refused with one sentence.

Every table below holds cases with what they must give: rows, or a pattern of the refusal.
"""

import gzip
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pytest

from sce import errors
from sce.data.reading import read_interactions
from sce.errors import InputError

HEADER = "user,item,ts\n"
GOOD = '{"user": 1, "item": 7, "ts": 1}\n'


class Attack:
    """Tries cases, and remembers those that were answered wrongly."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tried, self.wrong = folder, 0, list[str]()

    def write(self, name: str, content: Any) -> Path:
        path = self.folder / name
        if isinstance(content, pl.DataFrame):
            content.write_parquet(path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def read(self, source: Any, **options: Any) -> Any:
        """Rows of (user, item, microseconds); or the sentence of a refusal."""
        try:
            log = read_interactions(source, **options)
        except (InputError, OSError) as error:
            return str(error)
        users, items = log.user_ids.decode(log.users), log.item_ids.decode(log.items)
        return list(zip(users, items, log.timestamps.tolist(), strict=True))

    def expect(self, label: str, expected: Any, source: Any, **options: Any) -> None:
        """`expected` is a pattern, rows, or None for any rows or any sentence."""
        self.tried += 1
        try:
            found = self.read(source, **options)
        except BaseException as error:  # a panic of polars is no Exception
            found = ("traceback", repr(error)[:200])
        if isinstance(found, str):
            right = "\n" not in found and (
                expected is None or (isinstance(expected, str) and re.search(expected, found))
            )
        else:
            right = isinstance(found, list) and (expected is None or found == expected)
        if not right:
            self.wrong.append(f"{label}: expected {expected!r:.200}, got {found!r:.300}")


@pytest.fixture
def attack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Attack]:
    attack = Attack(tmp_path)
    yield attack
    with capsys.disabled():
        print(f" {attack.tried} hostile inputs tried", end="")
    assert not attack.wrong, "\n".join(attack.wrong)


IDS = [
    *("12", "0", "-3", "007", "+5", "-0", "1e5", "1E5", "0x10", "1_000", "1.0.0", "2409.10", ".5"),
    *("5.", " 5", "5 ", "NaN", "nan", "inf", "null", "NULL", "None", "N/A", "true", "False", "[1]"),
    *(
        '{"a": 1}',
        "[",
        "{",
        "ü",
        "u\u0308",
        "日本",
        "١٢",
        "😀",
        "\u2028",
        "a\u2029b",
        "\x85",
        "\x0b",
    ),
    *("a\x00b", "\x7f", "\u202eabc", "\ufeffx", "\ufffd", " ", "\u00a0", "a\tb", "a,b", 'say "x"'),
    *(
        "a\nb",
        "a\r\nb",
        "'",
        "=1+1",
        "'; DROP TABLE x",
        "../../x",
        "%s%n",
        "\\N",
        "\\",
        "a\\nb",
        "#",
    ),
    *(str(2**63 - 1), str(-(2**63)), str(2**63), "9" * 40, "x" * 100_000, "^user$", "*", "1,5"),
]


def is_plain_integer(text: str) -> bool:
    return re.fullmatch(r"0|-?[1-9][0-9]*", text) is not None and -(2**63) <= int(text) < 2**63


def test_ids_stay_what_they_are(attack: Attack) -> None:
    for number, text in enumerate(IDS):
        untyped: Any = [int(text), 7] if is_plain_integer(text) else [text, "7"]
        for role in ("user", "item"):
            quoted = '"' + text.replace('"', '""') + '"'
            lines = {
                "csv": HEADER
                + (f"{quoted},1,1\n7,1,2\n" if role == "user" else f"1,{quoted},1\n1,7,2\n"),
                "tsv": "",
                "jsonl": "".join(
                    json.dumps({"user": 1, "item": 1, "ts": at, role: one}) + "\n"
                    for at, one in ((1, text), (2, "7"))
                ),
            }
            frame = pl.DataFrame({"user": [1, 1], "item": [1, 1], "ts": [1, 2]})
            frame = frame.with_columns(pl.Series(role, [text, "7"]))
            lines["tsv"] = (
                lines["csv"].replace(quoted, "\0").replace(",", "\t").replace("\0", quoted)
            )
            for kind, content in (*lines.items(), ("parquet", frame)):
                path = attack.write(f"{number}{role}.{kind}", content)
                values = untyped if kind in ("csv", "tsv") else [text, "7"]
                rows = [(1, 1, 1_000_000), (1, 1, 2_000_000)]
                place = ("user", "item").index(role)
                rows = [
                    (*row[:place], v, *row[place + 1 :])
                    for v, row in zip(values, rows, strict=True)
                ]
                attack.expect(
                    f"{kind} {role} {text!r:.30}", sorted(rows, key=lambda r: (r[0], r[2])), path
                )
                path.unlink()


def test_ids_that_are_one_or_two_in_several_files(attack: Attack) -> None:
    def rows(*items: Any) -> list[tuple[Any, Any, int]]:
        return [(1, item, 1_000_000 * at) for at, item in enumerate(items, 1)]

    both = "the item ids 12 and 12.0 both occur"
    cases: list[tuple[list[list[Any]], Any]] = [
        ([["csv", "12.0"], ["csv", "12"]], rows(12, 12)),
        ([["csv", "12.0"], ["csv", "12"], ["csv", "abc"]], rows("12", "12", "abc")),
        ([["csv", "12.0"], ["csv", "12.0", "abc"]], both),
        ([["csv", "12"], ["csv", "12.0", "abc"]], both),
        ([["csv", "12", "12.0", "abc"]], both),
        ([["csv", "12", "12.0"]], rows(12, 12)),
        ([["csv", "12.0", "abc"]], rows("12.0", "abc")),
        ([["csv", "12.0", "12.5"]], rows("12.0", "12.5")),
        ([["csv", "12", "012"]], rows("12", "012")),
        ([["jsonl", 1, "1.0"]], rows("1", "1.0")),
        ([["jsonl", *[1] * 200, "1.0"]], rows(*["1"] * 200, "1.0")),
        ([["jsonl", *[1] * 200, 2.0]], rows(*[1] * 200, 2)),
        ([["jsonl", *[1.0] * 200, 2]], rows(*[1] * 200, 2)),
        ([["jsonl", *[1.0] * 200, "x"]], rows(*["1"] * 200, "x")),
        ([["jsonl", 12], ["jsonl", "12.0"]], both),
        ([["jsonl", "12"], ["jsonl", "12.0"]], rows("12", "12.0")),
        ([["jsonl", "1", "1.0"]], rows("1", "1.0")),
        ([["parquet", "1", "1.0"]], rows("1", "1.0")),
        ([["parquet", 12.0], ["csv", "12.0", "abc"]], both),
        ([["parquet", 12.0], ["parquet", "12"]], rows("12", "12")),
        ([["parquet", 12.0], ["jsonl", 12], ["csv", "12.0"]], rows(12, 12, 12)),
        ([["parquet", 2**63 + 1], ["csv", "5"]], rows(str(2**63 + 1), "5")),
    ]
    for number, (files, expected) in enumerate(cases):
        paths, rows_before = [], 0
        for place, (kind, *items) in enumerate(files):
            times = range(rows_before + 1, rows_before + len(items) + 1)
            rows_before += len(items)
            table = {"user": [1] * len(items), "item": items, "ts": times}
            content: Any = HEADER + "".join(
                f"1,{i},{t}\n" for i, t in zip(items, times, strict=True)
            )
            if kind == "jsonl":
                lines = ({"user": 1, "item": i, "ts": t} for i, t in zip(items, times, strict=True))
                content = "".join(json.dumps(line) + "\n" for line in lines)
            elif kind == "parquet":
                content = pl.DataFrame(table)
            paths.append(attack.write(f"{number}-{place}.{kind}", content))
        attack.expect(f"{files!r:.80}", expected, paths)


def test_json_values_that_are_no_ids(attack: Attack) -> None:
    values = {
        "[1]": "not \\[1\\]",
        "[]": "not \\[\\]",
        "{}": "not {}",
        '{"a": [1]}': "not {",
        "true": "not true",
        "false": "not false",
        "1.5": "not 1.5",
        "1e300": "not 1",
        "-0.5": "not -0.5",
        "null": "no (user|item), column '(user|item)' is empty",
        '""': "no (user|item), column '(user|item)' is empty",
        "[" * 3000 + "]" * 3000: "nested too deeply",
    }
    for text, message in values.items():
        for role in ("user", "item"):
            for before in (0, 1, 250):
                bad = GOOD.replace(
                    '"user": 1' if role == "user" else '"item": 7', f'"{role}": {text}'
                )
                path = attack.write("a.jsonl", GOOD * before + bad + GOOD)
                attack.expect(f"{role} {text:.20} after {before}", message, path)


SECOND = 1_000_000
TIMES: dict[str, Any] = {
    "0": 0,
    "-1": -SECOND,
    "1e3": 1000 * SECOND,
    "1.5": 1_500_000,
    "99999999999": 99_999_999_999 * SECOND,
    "1700000000000": 1_700_000_000_000_000,
    "1700000000000000": 1_700_000_000_000_000,
    "1700000000000000000": 1_700_000_000_000_000,
    str(2**63 - 1): (2**63 - 1) // 1000,
    str(-(2**63) + 1): (-(2**63) + 1) // 1000,
    str(2**63): "beyond what 64 bits hold",
    str(2**64): "beyond what 64 bits hold",
    "1e20": "beyond what 64 bits hold",
    "-1e300": "beyond what 64 bits hold",
    "2020-01-01": 1_577_836_800 * SECOND,
    "2020-01-01T00:00:00+00:00": 1_577_836_800 * SECOND,
    "0001-01-01": -62_135_596_800 * SECOND,
    "9999-12-31": 253_402_214_400 * SECOND,
    **dict.fromkeys(
        [
            *("", "x", "nan", "inf", "-inf", "1e999", "0x10", "12:00", "2020-13-01", "2020-02-30"),
            *("2020-01-01T25:00", "99999-01-01", "yesterday", "1 2", "2020-01-01T00:00:00+25:00"),
            *("٢٠٢٠", "1,5", "true", "[1]", "{}", "\x00", "\u2028", "0000-00-00"),
        ],
        "cannot read|is empty",
    ),
}


def test_times(attack: Attack) -> None:
    for text, expected in TIMES.items():
        wanted = expected if isinstance(expected, str) else [(1, 2, expected)]
        path = attack.write("a.csv", HEADER + f'1,2,"{text}"\n')
        attack.expect(f"csv {text!r}", wanted, path)
        path = attack.write("a.jsonl", json.dumps({"user": 1, "item": 2, "ts": text}) + "\n")
        attack.expect(f"jsonl {text!r}", wanted, path)
        # Beside a sound time of the same kind, the sound one first.
        other = "2020-01-01" if "-" in text[1:] and "e" not in text else "5"
        path = attack.write("a.csv", HEADER + f'1,3,{other}\n1,2,"{text}"\n')
        attack.expect(
            f"csv {text!r} beside {other}", expected if isinstance(expected, str) else None, path
        )
    columns: list[tuple[pl.Series, Any]] = [
        (pl.Series([2**62]).cast(pl.Datetime("ms")), "beyond what 64 bits hold"),
        (pl.Series([2**62]).cast(pl.Datetime("us")), 2**62),
        (pl.Series([2**62]).cast(pl.Datetime("ns")), 2**62 // 1000),
        (pl.Series([-(2**62)]).cast(pl.Datetime("ms")), "beyond what 64 bits hold"),
        (pl.Series([2**31 - 1], dtype=pl.Int32).cast(pl.Date), "beyond what 64 bits hold"),
        (pl.Series([-(2**31)], dtype=pl.Int32).cast(pl.Date), "beyond what 64 bits hold"),
        (pl.Series([date(9999, 12, 31)]), 253_402_214_400 * SECOND),
        (pl.Series([datetime(1, 1, 1)]), -62_135_596_800 * SECOND),
        (pl.Series([2**64 - 1], dtype=pl.UInt64), "cannot read 18446744073709551615"),
        (pl.Series([1e19]), "beyond what 64 bits hold"),
        (pl.Series([float("nan")]), "cannot read nan"),
        (pl.Series([True]), "holds no times"),
        (pl.Series([[1]]), "holds no times"),
        (pl.Series([None], dtype=pl.Int64), "no time"),
        (pl.Series([5], dtype=pl.Duration("us")), "holds no times"),
    ]
    for column, expected in columns:
        frame = pl.DataFrame({"user": [1], "item": [2], "ts": column})
        wanted = expected if isinstance(expected, str) else [(1, 2, expected)]
        attack.expect(f"parquet {column.dtype}", wanted, attack.write("a.parquet", frame))
        attack.expect(f"frame {column.dtype}", wanted, frame)


def test_files(attack: Attack) -> None:
    one = [(1, 2, 3_000_000)]
    row = "1,2,3\n"
    parquet = attack.write(
        "x.parquet", pl.DataFrame({"user": [1], "item": [2], "ts": [3]})
    ).read_bytes()
    cases: list[tuple[str, Any, Any]] = [
        ("a.csv", "", "empty"),
        ("a.csv", "\n\n\n", "empty|no column"),
        ("a.csv", HEADER, "no rows"),
        ("a.csv", HEADER + "\n\n", "no rows|lack"),
        ("a.csv", HEADER + row, one),
        ("a.csv", HEADER.strip() + "\r\n1,2,3\r\n", one),
        ("a.csv", HEADER + row + row.replace("2", "2,9"), "line 3: 4 fields"),
        ("a.csv", "user,item,ts,item\n1,2,3,4\n", "two columns are called 'item'"),
        ("a.csv", "item,user,item,ts\n9,1,2,3\n", "two columns are called 'item'"),
        ("a.csv", "user,item,ts,user_id\n1,2,3,4\n", "could all be the user"),
        ("a.csv", "user,item,ts,note,note\n1,2,3,4,5\n", one),
        ("a.csv", row, "header line missing"),
        ("a.csv", "user;item;ts\n1;2;3\n", "no column looks like the user"),
        ("a.csv", HEADER + '1,"2,3\n', "line 2: malformed csv"),
        ("a.csv", (HEADER + row).encode("utf-16"), "."),
        ("a.csv", HEADER.encode() + b"1,\xff,3\n", "line 2: not UTF-8"),
        ("a.csv", HEADER.encode() + b"\x00" * 100, "."),
        ("a.csv", b"PK\x03\x04" + bytes(range(256)), "."),
        ("a.csv", parquet, "."),
        ("a.csv", gzip.compress((HEADER + row).encode()), None),
        ("a.csv.gz", HEADER + row, None),
        ("a.csv.gz", gzip.compress(gzip.compress((HEADER + row).encode())), "."),
        ("a.csv.gz", gzip.compress(b""), "empty"),
        ("a.csv.zst", HEADER + row, None),
        ("a.parquet", HEADER + row, "no parquet file"),
        ("a.parquet", parquet[:-4], "no parquet file"),
        ("a.parquet", parquet[:4] + parquet[-8:], "no parquet file"),
        ("a.jsonl", HEADER + row, "line 1: malformed JSON"),
        ("a.jsonl", f"[{GOOD.strip()}, {GOOD.strip()}]", "no JSON object|malformed"),
        ("a.jsonl", "null\n", "no JSON object|."),
        ("a.jsonl", GOOD + "\x00\n", "."),
        ("a.jsonl", GOOD + GOOD.strip(), [(1, 7, 1_000_000)] * 2),
        ("a.jsonl", GOOD.strip() + GOOD, "."),
        (
            "a.jsonl",
            GOOD * 200 + '{"user": 1, "item": 2, "ts": 3, "x": ' + "[" * 10**5 + "\n",
            "nested too",
        ),
        ("a.jsonl", GOOD + '{"user": "\\ud800", "item": 1, "ts": 3}\n', "."),
        ("a.jsonl", GOOD.replace("7", '"a\u2028b"') * 2, [(1, "a\u2028b", 1_000_000)] * 2),
        ("a.txt", HEADER + row, "does not tell the format"),
        ("a.xlsx", b"PK", "does not tell the format"),
    ]
    for number, (name, content, expected) in enumerate(cases):
        attack.expect(f"file {number} {name}", expected, attack.write(name, content))
    two = attack.write("two.csv", HEADER + "1,2,3\n,5,6\n4,,6\n")
    attack.expect(
        "two bad rows, one without a user, one without an item", "line 3: .*; 2 rows", two
    )


def test_names(attack: Attack) -> None:
    table = HEADER + "1,2,3\n"
    names = [
        "a b.csv",
        "ü.csv",
        "[1].csv",
        "*.csv",
        "?.csv",
        "~.csv",
        "-.csv",
        "$(x).csv",
        "a\nb.csv",
    ]
    names += ["\u202ea.csv", "#.csv", "%20.csv", "{a,b}.csv", "'.csv", "a" * 200 + ".csv", "\\.csv"]
    for name in names:
        path = attack.write(name, table)
        attack.expect(f"name {name!r:.20}", [(1, 2, 3_000_000)], path)
        path.unlink()
    folder = os.fsencode(attack.folder)
    Path(os.fsdecode(folder + b"/\xff.csv")).write_text(table)
    (attack.folder / "loop.csv").symlink_to(attack.folder / "loop.csv")
    (attack.folder / "gone.csv").symlink_to(attack.folder / "nowhere")
    os.mkfifo(attack.folder / "pipe.csv")
    refused: list[tuple[Any, str]] = [
        (os.fsdecode(folder + b"/\xff.csv"), "no name in UTF-8"),
        (os.fsdecode(folder + b"/\xff*y.csv"), "no file matches"),
        (str(attack.folder / "?.csv"), "no name in UTF-8"),
        ("a\0b.csv", "no such file"),
        ("*\0.csv", "no file matches"),
        ("", "directory|no such file"),
        ([], "no input file"),
        ("x" * 5000 + ".csv", "no such file|too long"),
        (attack.folder / "loop.csv", "no such file|."),
        (attack.folder / "gone.csv", "no such file"),
        (attack.folder / "pipe.csv", "is a pipe or a device"),
        ("/dev/null", "is a pipe or a device"),
        (attack.folder, "is a directory"),
        ("http://localhost/a.csv", "no such file"),
        ("s3://bucket/a.csv", "no such file"),
        (5, "expected files or a data frame"),
        (None, "expected files or a data frame"),
        ({}, "expected files or a data frame"),
    ]
    for source, message in refused:
        attack.expect(f"name {source!r:.60}", message, source)


def test_frames(attack: Attack) -> None:
    good = {"user": [1, 1], "item": [2, 3], "ts": [1, 2]}
    twice = pd.DataFrame([[1, 2, 3, 4]], columns=["user", "item", "ts", "item"])
    cases: list[tuple[Any, Any]] = [
        (pd.DataFrame(good), [(1, 2, 1_000_000), (1, 3, 2_000_000)]),
        (twice, "two columns of one name"),
        (pd.DataFrame(good | {"item": [1.5, 2]}), "fractions such as 1.5"),
        (pd.DataFrame(good | {"item": [2.0, 3.0]}), [(1, 2, 1_000_000), (1, 3, 2_000_000)]),
        (pd.DataFrame(good | {"item": [None, 3]}), "row 1: no item"),
        (pd.DataFrame(good | {"item": [[1], [2]]}), "column 'item'"),
        (pd.DataFrame(good | {"item": [1, "b"]}), "column 'item'"),
        (pd.DataFrame(good | {"item": [True, False]}), "column 'item'"),
        (pd.DataFrame(good | {"ts": ["x", "y"]}), "cannot read 'x'"),
        (pd.DataFrame({}), "no column looks like the user"),
        (pl.DataFrame(good).clear(), "no rows"),
        (pl.DataFrame(good).lazy(), [(1, 2, 1_000_000), (1, 3, 2_000_000)]),
        (pl.DataFrame(good)["user"], "."),
        (
            pl.DataFrame(good | {"item": [b"\xff", b"a"]}),
            [(1, "ff", 1_000_000), (1, "61", 2_000_000)],
        ),
        (
            pl.DataFrame(good | {"item": pl.Series([object(), object()], dtype=pl.Object)}),
            "ids must be",
        ),
    ]
    for number, (frame, expected) in enumerate(cases):
        attack.expect(f"frame {number}", expected, frame)


def test_damage_anywhere_is_no_traceback(attack: Attack) -> None:
    chooser = random.Random(0)
    rows = [(n % 5, f"item {n % 7}", 1_600_000_000 + n) for n in range(60)]
    table = pl.DataFrame(rows, schema=["user", "item", "ts"], orient="row")
    contents = {"a.csv": table.write_csv().encode(), "a.jsonl": table.write_ndjson().encode()}
    contents |= {"a.csv.gz": gzip.compress(contents["a.csv"])}
    for name, content in contents.items():
        for number in range(60):
            data, place = bytearray(content), chooser.randrange(len(content))
            how = number % 3
            if how == 0:
                data[place] ^= 1 << chooser.randrange(8)
            elif how == 1:
                del data[place:]
            else:
                data[place:place] = chooser.choice(
                    [b"\x00", b'"', b"\n", b"\xff", b"{", b",", b"[" * 2000]
                )
            attack.expect(f"{name} {how} at {place}", None, attack.write(name, bytes(data)))


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("$SCE prepare <(cat a.csv) --format csv --out data", 2, "is a pipe or a device"),
        ("cat a.csv | $SCE prepare /dev/stdin --format csv --out data", 2, "is a pipe or a device"),
        ("$SCE prepare /dev/stdin --format csv --out data < a.csv", 0, ""),
        ("$SCE prepare $'\\xff.csv' --out data", 2, "no name in UTF-8"),
        ("PYTHONIOENCODING=ascii $SCE prepare ü.csv --out dätä", 0, ""),
        ("$SCE prepare a.csv --out $'data\\xff'", None, ""),
        ("ulimit -v 1000000; $SCE prepare a.csv --out data", 2, "error: reading a.csv needs about"),
    ],
)
def test_a_shell_is_answered(command: str, code: int | None, message: str, tmp_path: Path) -> None:
    rows = "".join(f"{n // 5},ü{n % 7},{n}\n" for n in range(200))
    for name in (b"a.csv", "ü.csv".encode(), b"\xff.csv"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text(HEADER + rows)
    done = subprocess.run(
        ["bash", "-c", command.replace("$SCE", f"{sys.executable} -m sce")],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(Path(errors.__file__).parents[1])}
        | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "POLARS_MAX_THREADS"), "1"),
        capture_output=True,
        check=False,
    )
    text = done.stderr.decode(errors="replace")
    assert "Traceback" not in text
    assert done.returncode == code or (code is None and done.returncode in (0, 2)), text
    assert message in text
