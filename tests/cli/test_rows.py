import csv
import json
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from sce.cli.rows import Format, Rows, open_rows
from sce.errors import InputError
from sce.recommend import Id, Recommended


def found(*items: Id) -> Recommended:
    scores = np.linspace(2, 0.1, len(items), dtype=np.float32)
    return Recommended(list(items), scores, known=1)


def write(
    out: Path,
    users: dict[Any, Recommended],
    format_: Format | None = None,
    *,
    force: bool = False,
    error: BaseException | None = None,
) -> None:
    with open_rows(out, format_, force=force) as rows:
        for user, one in users.items():
            rows.add(user, one)
        if error is not None:
            raise error


USERS: dict[Any, Recommended] = {
    7: found('a,"b"', "ż"),
    -8: found(),
    9: replace(found("c"), source="popular"),
}


def test_a_name_that_polars_cannot_take_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write(tmp_path / "\udcff.parquet", {})
    assert not list(tmp_path.iterdir())


def test_csv(tmp_path: Path) -> None:
    write(tmp_path / "rows.csv", USERS)
    text = (tmp_path / "rows.csv").read_text(encoding="utf-8")
    assert text == (
        'user_id,item_id,score,rank,source\n7,"a,""b""",2.0,1,model\n7,ż,0.1,2,model\n'
        "9,c,2.0,1,popular\n"
    )
    assert [row["item_id"] for row in csv.DictReader(text.splitlines())] == ['a,"b"', "ż", "c"]


def test_jsonl(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", USERS)
    lines = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"user_id": 7, "items": ['a,"b"', "ż"], "scores": [2.0, 0.1], "source": "model"},
        {"user_id": -8, "items": [], "scores": [], "source": "model"},
        {"user_id": 9, "items": ["c"], "scores": [2.0], "source": "popular"},
    ]


def test_parquet(tmp_path: Path) -> None:
    write(tmp_path / "rows.parquet", USERS)
    frame = pl.read_parquet(tmp_path / "rows.parquet")
    second = float(np.float32(0.1))  # to the bit
    assert frame.rows() == [
        (7, 'a,"b"', 2.0, 1, "model"),
        (7, "ż", second, 2, "model"),
        (9, "c", 2.0, 1, "popular"),
    ]
    assert frame.schema == {
        "user_id": pl.Int64,
        "item_id": pl.String,
        "score": pl.Float32,
        "rank": pl.Int32,
        "source": pl.String,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
def test_titles_are_the_last_column(tmp_path: Path, name: str) -> None:
    one = replace(found(1, 2), titles=['"Ż", <b>', "2"])
    with open_rows(tmp_path / name, None, titles=True) as rows:
        rows.add(7, one)
        rows.add(8, replace(found(), titles=[]))
        rows.add("9\r\n", replace(found(3), titles=["a\rb"]))
    read: dict[str, Any] = {"csv": pl.read_csv, "parquet": pl.read_parquet}
    frame = read[name.partition(".")[2]](tmp_path / name)
    assert frame.columns == ["user_id", "item_id", "score", "rank", "source", "title"]
    assert frame["title"].to_list() == ['"Ż", <b>', "2", "a\rb"]
    if name == "rows.csv":  # also for readers to whom a carriage return alone ends a line
        with (tmp_path / name).open(newline="", encoding="utf-8") as file:
            assert [row[0] for row in csv.reader(file)] == ["user_id", "7", "7", "9\r\n"]


def test_similar_items_have_titles_and_no_source(tmp_path: Path) -> None:
    one = replace(found(1, 2), titles=["Ż", "2"])
    for name in ("rows.csv", "rows.parquet", "rows.jsonl"):
        with open_rows(tmp_path / name, None, whose="item_id", titles=True) as rows:
            rows.add(7, one)
    header, row = (tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()[:2]
    assert (header, row) == ("item_id,similar_id,score,rank,title", "7,1,2.0,1,Ż")
    assert ",".join(pl.read_parquet(tmp_path / "rows.parquet").columns) == header
    assert json.loads((tmp_path / "rows.jsonl").read_text(encoding="utf-8")) == {
        "item_id": 7,
        "items": [1, 2],
        "scores": [2.0, 0.1],
        "titles": ["Ż", "2"],
    }


@pytest.mark.parametrize("late", ["last", 2**64])
def test_ids_of_two_kinds_become_text_in_parquet(tmp_path: Path, late: Id) -> None:
    write(tmp_path / "rows.parquet", {1: found(5, 6), 2: found(5, 6), late: found(5)})
    frame = pl.read_parquet(tmp_path / "rows.parquet")
    assert frame["user_id"].to_list() == ["1", "1", "2", "2", str(late)]
    assert frame["item_id"].dtype == pl.Int64


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
def test_nothing_but_the_columns(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, {1: found()})
    if name.endswith("parquet"):
        frame = pl.read_parquet(tmp_path / name)
        assert frame.columns == ["user_id", "item_id", "score", "rank", "source"]
        assert len(frame) == 0
    else:
        header = "user_id,item_id,score,rank,source\n"
        if name.endswith("jsonl"):
            header = '{"user_id": 1, "items": [], "scores": [], "source": "model"}\n'
        assert (tmp_path / name).read_text() == header


def test_the_format_may_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "rows.txt", USERS, "jsonl")
    with open_rows(None, "jsonl") as rows:
        for user, one in USERS.items():
            rows.add(user, one)
    assert capsys.readouterr().out == (tmp_path / "rows.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize(
    "error", [InputError("bad line"), KeyboardInterrupt(), OSError(28, "full")]
)
def test_whatever_goes_wrong_nothing_remains(
    tmp_path: Path, name: str, error: BaseException
) -> None:
    expected = InputError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected, match="no space left" if isinstance(error, OSError) else None):
        write(tmp_path / name, USERS, error=error)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_kept_until_the_new_one_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    out.write_text("dear")
    with pytest.raises(InputError, match="--force"):
        write(out, USERS)
    with pytest.raises(ZeroDivisionError):
        write(out, USERS, force=True, error=ZeroDivisionError())
    assert out.read_text() == "dear"
    write(out, USERS, force=True)
    assert out.read_text().endswith("9,c,2.0,1,popular\n")


def test_a_file_that_appears_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.csv"
    monkeypatch.setattr(Rows, "finish", lambda _: out.write_text("dear"))
    with pytest.raises(InputError, match="it was written meanwhile; move it away"):
        write(out, USERS)
    assert out.read_text() == "dear"


def test_a_disk_that_is_full_when_parquet_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, finish = resource.getrlimit(resource.RLIMIT_FSIZE), Rows.finish

    def fill_up(rows: Rows) -> None:
        finish(rows)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, usual[1]))

    monkeypatch.setattr(Rows, "finish", fill_up)
    users = {user: found(*range(user, user + 50)) for user in range(99)}
    try:
        with pytest.raises(InputError, match=r"cannot write .*rows\.parquet: "):
            write(tmp_path / "rows.parquet", users)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert list(tmp_path.iterdir()) == []


def test_parquet_needs_polars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(InputError, match=r"scalable-cross-entropy\[prepare\]"):
        write(tmp_path / "rows.parquet", USERS)
    write(tmp_path / "rows.csv", USERS)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
