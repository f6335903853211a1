"""The whole job as a user does it: one command after another, from a log to a page."""

import csv
import io
import json
import sys
from pathlib import Path

import pytest

from sce.cli import main
from sce.training.run import Run
from tests.complaint import complaint
from tests.cycle_data import walk

USERS, ITEMS = 60, 30
SMALL = ["--model.dim", "16", "--model.blocks", "1", "--model.max-length", "8"]
SETTINGS = [*SMALL, "--batch-size", "8", "--learning-rate", "0.01", "--device", "cpu"]


def write_log(path: Path) -> None:
    """Everybody goes round a ring of items, from a place of their own."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["userid", "itemid", "timestamp"])
        for user in range(USERS):
            for hour, item in enumerate(walk(user, 9, ITEMS)):
                rows.writerow([f"u{user}", f"item-{item:02}", 1000 * hour + user])


def test_from_a_log_to_recommendations_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, data, run = (str(tmp_path / name) for name in ("log.csv", "data", "run"))

    def sce(*arguments: str) -> str:
        assert main([*arguments]) == 0
        return capsys.readouterr().out

    write_log(Path(log))
    sce("prepare", log, "--split", "leave-one-out", "--out", data)
    train = ["train", data, "--out", run, *SETTINGS, "--epochs"]
    sce(*train, "2")
    assert "--resume" in complaint([*train, "15"], capsys)
    sce(*train, "15", "--resume")
    result = Run.open(Path(run)).result()
    assert result is not None
    assert result["epochs"] > 2

    evaluated = json.loads(sce("evaluate", run, "--json"))
    assert evaluated["model"]["ndcg@10"] == pytest.approx(result["test"]["ndcg@10"])
    assert result["test"]["ndcg@10"] > 2 * result["popularity"]["test"]["ndcg@10"]

    history = {"user_id": "new", "history": ["item-03", "item-04", "never seen", "item-05"]}
    given = io.BytesIO(json.dumps(history).encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(given))
    found = list(csv.DictReader(io.StringIO(sce("recommend", run, "--histories", "-", "-k", "3"))))
    assert [row["user_id"] for row in found] == ["new"] * 3
    assert [row["rank"] for row in found] == ["1", "2", "3"]
    assert found[0]["item_id"] == "item-06"

    sce("report", run, "--out", str(tmp_path / "page.html"))
    assert "item-" in (tmp_path / "page.html").read_text(encoding="utf-8")
