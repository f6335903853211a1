"""The whole job as a user does it: one process for each command, from a log to a page."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sce.training.run import Run
from tests.cycle_data import walk

pytestmark = pytest.mark.timeout(300)
USERS, ITEMS = 60, 30
SMALL = ["--model.dim", "16", "--model.blocks", "1", "--model.max-length", "8"]
SETTINGS = [*SMALL, "--batch-size", "8", "--learning-rate", "0.01", "--device", "cpu"]


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "sce", *arguments],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def sce(*arguments: str, given: str = "") -> str:
    process = start(*arguments)
    out, said = process.communicate(given)
    assert process.returncode == 0, said
    return out


def write_log(path: Path) -> None:
    """Everybody goes round a ring of items, from a place of their own."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["userid", "itemid", "timestamp"])
        for user in range(USERS):
            for hour, item in enumerate(walk(user, 9, ITEMS)):
                rows.writerow([f"u{user}", f"item-{item:02}", 1000 * hour + user])


def killed_while_training(data: Path, out: Path) -> None:
    """Train for as long as it takes, and kill it when some epochs are over."""
    process = start("train", str(data), "--out", str(out), "--epochs", "1000", *SETTINGS)
    try:
        metrics = out / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.02)
    finally:
        process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_from_a_log_to_recommendations_and_a_page(tmp_path: Path) -> None:
    log, data, run = tmp_path / "log.csv", tmp_path / "data", tmp_path / "run"
    write_log(log)
    sce("prepare", str(log), "--split", "leave-one-out", "--out", str(data))
    killed_while_training(data, run)
    done = len((run / "metrics.jsonl").read_text().splitlines())
    train = ["train", str(data), "--out", str(run), "--epochs", str(done + 15), *SETTINGS]
    refused = start(*train)
    assert "--resume" in refused.communicate()[1]
    assert refused.returncode == 2
    sce(*train, "--resume")
    result = Run.open(run).result()
    assert result is not None
    assert result["epochs"] > done

    evaluated = json.loads(sce("evaluate", str(run), "--json"))
    assert evaluated["model"]["ndcg@10"] == pytest.approx(result["test"]["ndcg@10"])
    assert result["test"]["ndcg@10"] > 2 * result["popularity"]["test"]["ndcg@10"]

    history = {"user_id": "new", "history": ["item-03", "item-04", "never seen", "item-05"]}
    out = sce("recommend", str(run), "--histories", "-", "-k", "3", given=json.dumps(history))
    found = list(csv.DictReader(io.StringIO(out)))
    assert [row["user_id"] for row in found] == ["new"] * 3
    assert [row["rank"] for row in found] == ["1", "2", "3"]
    assert found[0]["item_id"] == "item-06"

    page = tmp_path / "page.html"
    sce("report", str(run), "--out", str(page))
    assert "item-" in page.read_text(encoding="utf-8")
