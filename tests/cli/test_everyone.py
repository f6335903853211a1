"""Recommending to everybody in a log, from prepare to rows, without training."""

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from sce.cli import main
from sce.data.prepare import prepare
from tests.tiny_run import make_run

pytestmark = pytest.mark.filterwarnings("ignore::sce.data.prepare.PrepareWarning")
Capture = pytest.CaptureFixture[str]
ITEMS = 30


def make_log(path: Path) -> dict[str, set[str]]:
    """Users of one to twelve events, one of an item that nobody else has; what each had."""
    random = np.random.default_rng(0)
    rows = [
        (f"user {user:03}", f"item {random.integers(ITEMS):02}", 100 * user + 7 * n * n)
        for user in range(200)
        for n in range(1 + user % 12)
    ]
    rows.append(("zoë", "unique", 30_000))
    pl.DataFrame(rows, ["user", "item", "time"], orient="row").write_csv(path)
    had: dict[str, set[str]] = {user: set() for user, _, _ in rows}
    for user, item, _ in rows:
        had[user].add(item)
    return had


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("options", [{}, {"min_item_users": 2, "min_user_items": 4}])
def test_everybody_is_served_and_nobody_gets_what_they_had(
    options: dict[str, int], tmp_path: Path, capsys: Capture
) -> None:
    had = make_log(tmp_path / "log.csv")
    dataset = prepare(tmp_path / "log.csv", tmp_path / "data", **options)  # type: ignore[arg-type]
    assert len(dataset.user_ids) < len(had)
    run = make_run(tmp_path / "run", dataset, ended=True)
    out = tmp_path / "found.csv"
    assert main(["recommend", str(run.path), "-k", "5", "--out", str(out)]) == 0
    rows = read(out)
    assert Counter(row["user_id"] for row in rows) == dict.fromkeys(had, 5)
    assert not [row for row in rows if row["item_id"] in had[row["user_id"]]]
    popular = {row["user_id"] for row in rows if row["source"] == "popular"}
    catalogue = set(dataset.item_ids.decode(range(dataset.n_items)))
    assert popular == {user for user, items in had.items() if not items & catalogue} >= {"zoë"}
    assert capsys.readouterr().err == (
        f"sce: the most popular items for {len(popular)} of 201 users, marked so: none of their "
        "items is in the catalogue\n"
        "sce: wrote 1,005 rows for 201 users\n"
    )


def test_titles_of_the_dataset_and_of_a_file(tmp_path: Path, capsys: Capture) -> None:
    make_log(tmp_path / "log.csv")
    (tmp_path / "titles.csv").write_text("item,title\nitem 03,Three\nunique,One\n")
    (tmp_path / "other.jsonl").write_text('{"n": "item 04", "t": "Vier"}\n{"n": "x", "t": "y"}\n')
    dataset = prepare(tmp_path / "log.csv", tmp_path / "data", titles=tmp_path / "titles.csv")
    run = make_run(tmp_path / "run", dataset, ended=True)
    command = ["recommend", str(run.path), "-k", str(ITEMS), "--users", "zoë", "--format", "jsonl"]
    named = []
    for options in ([], ["--titles", f"{tmp_path}/other.jsonl", "--titles-columns", "n", "t"]):
        assert main([*command, *options]) == 0
        captured = capsys.readouterr()
        row = json.loads(captured.out)
        assert [*row] == ["user_id", "items", "scores", "source", "titles"]
        both = zip(row["items"], row["titles"], strict=True)
        named.append({item: title for item, title in both if title != item})
    assert named == [{"item 03": "Three"}, {"item 04": "Vier"}]
    assert f"titles: 1 of {ITEMS} items have one; 1 id of the file not in" in captured.err
    assert main([*command, "--titles-columns", "n", "t"]) == 2
