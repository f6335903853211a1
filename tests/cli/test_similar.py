import json
from pathlib import Path

import polars as pl
import pytest

from sce.cli import main
from sce.recommend import Recommender
from sce.training.run import Run
from tests.cli.test_requests import recommender as recommender  # fixtures
from tests.cli.test_requests import run as run
from tests.complaint import complaint

Capture = pytest.CaptureFixture[str]


def test_similar_items_as_rows_and_lines(
    run: Run, recommender: Recommender, tmp_path: Path, capsys: Capture
) -> None:
    found = recommender.similar([60, 55], k=3)
    assert main(["similar", str(run.path), "60", "55", "-k", "3"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header == "item_id,similar_id,score,rank"
    expected = [
        f"{item},{other},{score!s},{rank}"
        for item, one in zip((60, 55), found, strict=True)
        for other, score, rank in zip(one.items, one.scores, one.ranks, strict=True)
    ]
    assert rows == expected
    assert main(["similar", str(run.path), "60", "55", "-k", "3", "--format", "jsonl"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert list(first) == ["item_id", "items", "scores"]
    assert (first["item_id"], second["items"]) == (60, found[1].items)
    out = tmp_path / "similar.parquet"
    assert main(["similar", str(run.path), "60", "55", "-k", "3", "--out", str(out)]) == 0
    frame = pl.read_parquet(out)
    assert frame.columns == header.split(",")
    assert frame["similar_id"].to_list() == found[0].items + found[1].items


def test_few_that_may_be_named(run: Run, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "allow").write_text("60\n61\n62\n")
    (tmp_path / "block").write_text("62\n")
    options = ["--allow", str(tmp_path / "allow"), "--block", str(tmp_path / "block")]
    assert main(["similar", str(run.path), "60", *options]) == 0
    captured = capsys.readouterr()
    assert [row.split(",")[:2] for row in captured.out.splitlines()[1:]] == [["60", "61"]]
    assert captured.err == "sce: 1 of 1 item got fewer than 10: no more may be named\n"


def test_what_cannot_be(run: Run, capsys: Capture) -> None:
    line = complaint(["similar", run.path, "60", "600"], capsys)
    assert "no item '600' in the catalogue; the closest are 87, 88, 89" in line
    line = complaint(["similar", run.path, "plum"], capsys)
    assert "no item 'plum' in the catalogue; the closest are 50, 51" in line
    assert "only 40 items" in complaint(["similar", run.path, "60", "-k", "41"], capsys)
    both = ["--allow", "-", "--block", "-"]
    assert "read but once" in complaint(["similar", run.path, "60", *both], capsys)
    assert "ITEM" in complaint(["similar", run.path], capsys)
