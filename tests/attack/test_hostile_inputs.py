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

import numpy as np
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


WORDS = r"""
12 0 -3 007 +5 -0 1e5 1E5 0x10 1_000 1.0.0 2409.10 .5 5. 1,5 NaN nan inf null NULL None N/A true
False [1] [ { {} [] ü 日本 ١٢ 😀 � a,b ' =1+1 ../../x %s%n \N \ a\nb # ^user$ * -- ; <b> $HOME `x`
"""
IDS = [
    *WORDS.split(),
    *("u\u0308", "\u202eabc", "\ufeffx"),
    *(" 5", "5 ", "\u2028", "a\u2029b", "\x85", "\x0b", "a\x00b", "\x7f", " ", "\u00a0", "a\tb"),
    *('{"a": 1}', 'say "x"', "a\nb", "a\r\nb", "'; DROP TABLE x", "9" * 40, "x" * 100_000),
    *(str(2**63 - 1), str(-(2**63)), str(2**63)),
]


def is_plain_integer(text: str) -> bool:
    return re.fullmatch(r"0|-?[1-9][0-9]*", text) is not None and -(2**63) <= int(text) < 2**63


def write_table(attack: Attack, name: str, items: list[Any], *, times: Any, role: str) -> Path:
    """A file of events with these items, or users."""
    table = {"user": 1, "item": 1, "ts": times} | {role: items}
    if name.endswith("jsonl"):
        rows = [table | {"ts": time, role: one} for time, one in zip(times, items, strict=True)]
        return attack.write(name, "".join(json.dumps(row) + "\n" for row in rows))
    frame = pl.DataFrame(table)
    if name.endswith("parquet"):
        return attack.write(name, frame)
    separator = "\t" if name.endswith("tsv") else ","
    return attack.write(name, frame.write_csv(separator=separator, quote_style="always"))


def test_ids_stay_what_they_are(attack: Attack) -> None:
    for text in IDS:
        for kind in ("csv", "tsv", "jsonl", "parquet"):
            values: list[Any] = [text, "7"]
            if kind in ("csv", "tsv") and is_plain_integer(text):
                values = [int(text), 7]
            pairs = list(zip(values, (1_000_000, 2_000_000), strict=True))
            for role in ("user", "item"):
                path = write_table(attack, f"a.{kind}", [text, "7"], times=[1, 2], role=role)
                rows = [(1, one, time) for one, time in pairs]
                if role == "user":
                    rows = sorted((one, 1, time) for one, time in pairs)
                attack.expect(f"{kind} {role} {text!r:.30}", rows, path)


def test_ids_that_are_one_or_two_in_several_files(attack: Attack) -> None:
    both = "the item ids 12 and 12.0 both occur"
    cases: list[tuple[list[list[Any]], Any]] = [
        ([["csv", "12.0"], ["csv", "12"]], [12, 12]),
        ([["csv", "12.0"], ["csv", "12"], ["csv", "abc"]], ["12", "12", "abc"]),
        ([["csv", "12.0"], ["csv", "12.0", "abc"]], both),
        ([["csv", "12"], ["csv", "12.0", "abc"]], both),
        ([["csv", "12", "12.0", "abc"]], both),
        ([["csv", "12", "12.0"]], [12, 12]),
        ([["csv", "12.0", "abc"]], ["12.0", "abc"]),
        ([["csv", "12.0", "12.5"]], ["12.0", "12.5"]),
        ([["csv", "12", "012"]], ["12", "012"]),
        ([["jsonl", 1, "1.0"]], ["1", "1.0"]),
        ([["jsonl", *[1] * 200, "1.0"]], [*["1"] * 200, "1.0"]),
        ([["jsonl", *[1] * 200, 2.0]], [*[1] * 200, 2]),
        ([["jsonl", *[1.0] * 200, 2]], [*[1] * 200, 2]),
        ([["jsonl", *[1.0] * 200, "x"]], [*["1"] * 200, "x"]),
        ([["jsonl", 12], ["jsonl", "12.0"]], both),
        ([["jsonl", "12"], ["jsonl", "12.0"]], ["12", "12.0"]),
        ([["jsonl", "1", "1.0"]], ["1", "1.0"]),
        ([["parquet", "1", "1.0"]], ["1", "1.0"]),
        ([["parquet", 12.0], ["csv", "12.0", "abc"]], both),
        ([["parquet", 12.0], ["parquet", "12"]], ["12", "12"]),
        ([["parquet", 12.0], ["jsonl", 12], ["csv", "12.0"]], [12, 12, 12]),
        ([["parquet", 2**63 + 1], ["csv", "5"]], [str(2**63 + 1), "5"]),
    ]
    for files, expected in cases:
        paths, rows = [], 0
        for place, (kind, *items) in enumerate(files):
            times = list(range(rows + 1, rows + len(items) + 1))
            rows += len(items)
            name = f"{place}.{kind}"
            paths.append(write_table(attack, name, items, times=times, role="item"))
        if expected is not both:
            expected = [(1, item, 1_000_000 * at) for at, item in enumerate(expected, 1)]
        attack.expect(f"{files!r:.80}", expected, paths)


def test_json_values_that_are_no_ids(attack: Attack) -> None:
    values = {
        "[1]": "not \\[1\\]",
        "[]": "not \\[\\]",
        "{}": "not {}",
        '{"a": [1]}': "not {",
        **{text: f"not {text}" for text in ("true", "false", "1.5", "-0.5")},
        "1e300": "not 1",
        **dict.fromkeys(["null", '""'], "no (user|item), column '(user|item)' is empty"),
        "[" * 3000 + "]" * 3000: "nested too deeply",
        "9" * 5000: "line .*too many digits",
    }
    for text, message in values.items():
        for role in ("user", "item"):
            for before in (0, 1, 250):
                bad = re.sub(f'"{role}": .', lambda _: f'"{role}": {text}', GOOD)  # noqa: B023
                path = attack.write("a.jsonl", GOOD * before + bad + GOOD)
                attack.expect(f"{role} {text:.20} after {before}", message, path)


SECOND, BEYOND = 1_000_000, "beyond what 64 bits hold"
TIMES: dict[str, Any] = {
    "0": 0,
    "-1": -SECOND,
    "1e3": 1000 * SECOND,
    "1.5": 1_500_000,
    "99999999999": 99_999_999_999 * SECOND,
    **dict.fromkeys(["17" + "0" * zeros for zeros in (11, 14, 17)], 1_700_000_000_000_000),
    str(2**63 - 1): (2**63 - 1) // 1000,
    str(-(2**63) + 1): (-(2**63) + 1) // 1000,
    **dict.fromkeys([str(2**63), str(2**64), "1e20", "-1e300"], BEYOND),
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
        beside = expected if isinstance(expected, str) else None
        attack.expect(f"csv {text!r} beside {other}", beside, path)
    columns: list[tuple[pl.Series, Any]] = [
        *((pl.Series([n]).cast(pl.Datetime("ms")), BEYOND) for n in (2**62, -(2**62))),
        (pl.Series([2**62]).cast(pl.Datetime("us")), 2**62),
        (pl.Series([2**62]).cast(pl.Datetime("ns")), 2**62 // 1000),
        *((pl.Series([n], dtype=pl.Int32).cast(pl.Date), BEYOND) for n in (2**31 - 1, -(2**31))),
        (pl.Series([date(9999, 12, 31)]), 253_402_214_400 * SECOND),
        (pl.Series([datetime(1, 1, 1)]), -62_135_596_800 * SECOND),
        (pl.Series([2**64 - 1], dtype=pl.UInt64), "cannot read 18446744073709551615"),
        (pl.Series([1e19]), BEYOND),
        (pl.Series([float("nan")]), "cannot read nan"),
        *((pl.Series([one]), "holds no times") for one in (True, [1])),
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
    frame = pl.DataFrame({"user": [1], "item": [2], "ts": [3]})
    parquet = attack.write("x.parquet", frame).read_bytes()
    deep = GOOD * 200 + '{"user": 1, "item": 2, "ts": 3, "x": ' + "[" * 10**5
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
        ("a.jsonl", deep, "nested too"),
        *(
            (
                "a.jsonl",
                GOOD + GOOD.replace("}", f', "{key}": 5}}'),
                f"line 2: .* '{key}' occurs twice",
            )
            for key in ("user", "item", "ts")
        ),
        ("a.jsonl", GOOD.replace("}", ', "x": {"user": "user"}, "note": "ts"}'), [(1, 7, 10**6)]),
        ("a.jsonl", "\ufeff" + GOOD, [(1, 7, 1_000_000)]),
        ("a.jsonl", "\ufeff" + GOOD + "{", "line 2: malformed JSON"),
        ("a.jsonl.gz", gzip.compress(("\ufeff" + GOOD).encode()), [(1, 7, 1_000_000)]),
        # Two bad rows are two, whatever each of them lacks.
        ("a.csv", HEADER + "1,2,3\n,5,6\n4,,6\n", "line 3: .*; 2 rows"),
        ("a.jsonl", GOOD + '{"user": "\\ud800", "item": 1, "ts": 3}\n', "."),
        ("a.jsonl", GOOD.replace("7", '"a\u2028b"') * 2, [(1, "a\u2028b", 1_000_000)] * 2),
        ("a.txt", HEADER + row, "does not tell the format"),
        ("a.xlsx", b"PK", "a workbook is not read"),
    ]
    for number, (name, content, expected) in enumerate(cases):
        attack.expect(f"file {number} {name}", expected, attack.write(name, content))


def test_names(attack: Attack) -> None:
    table = HEADER + "1,2,3\n"
    names = ["a b", "ü", "[1]", "*", "?", "~", "-", "$(x)", "a\nb", "\u202ea", "#", "%20", "{a,b}"]
    names += ["'", "a" * 200, "\\"]
    for name in names:
        path = attack.write(f"{name}.csv", table)
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
        *((f"{scheme}://x/a.csv", "no such file") for scheme in ("http", "s3")),
        *((one, "expected files or a data frame") for one in (5, None, dict[str, int]())),
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
        (pd.DataFrame(good | {"item": ["\ud800", "b"]}), "column 'item': .*surrogates"),
        (pd.DataFrame(good | {"item": np.array([2, 3], np.longdouble)}), None),
        (pd.DataFrame([[1, 2, 3]]), "must have text as names; got 0"),
        (pd.DataFrame([[1, 2, 3, 4]], columns=["user", "item", "ts", None]), "text as names"),
        ([pd.DataFrame(good)], "expected files or a data frame; got a list that holds DataFrame"),
        ([None], "a list that holds NoneType"),
        (b"a.csv", "a list that holds int"),
        (pd.DataFrame({}), "no column looks like the user"),
        (pl.DataFrame(good).clear(), "no rows"),
        (pl.DataFrame(good).lazy(), [(1, 2, 1_000_000), (1, 3, 2_000_000)]),
        (pl.DataFrame(good)["user"], "."),
        (pl.DataFrame(good | {"item": [b"\xff", b"a"]}), [(1, "ff", 10**6), (1, "61", 2 * 10**6)]),
        (pl.DataFrame(good | {"item": pl.Series([object()] * 2, dtype=pl.Object)}), "ids must be"),
    ]
    for number, (frame, expected) in enumerate(cases):
        attack.expect(f"frame {number}", expected, frame)
    attack.expect(
        "an order that is none", "order must be one of time, rows", pl.DataFrame(good), order="row"
    )
    for role in ("user", "item", "time"):
        attack.expect(
            f"no name of the {role}", "no column ''", pl.DataFrame(good), **{f"{role}_column": ""}
        )


INSERTED = [b"\x00", b'"', b"\n", b"\xff", b"{", b",", b"[" * 2000]


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
                data[place:place] = chooser.choice(INSERTED)
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
