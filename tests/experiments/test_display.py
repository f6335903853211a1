from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sce.experiments.datasets import Dataset
from sce.experiments.runner import SweepDisplay, SweepRunner, describe
from sce.experiments.spec import PlannedRun
from sce.experiments.store import SweepDirectory
from tests.experiments.made_rows import NEVER, make_row


@pytest.fixture
def run(tmp_path: Path) -> PlannedRun:
    settings = {"loss.name": "sce", "training.epochs": 100}
    dataset = Dataset("ring", tmp_path, "hash", 12)
    return PlannedRun("key", dataset, settings, label="ring sce seed=1")


def test_what_runs_what_is_done_and_the_best(tmp_path: Path, run: PlannedRun) -> None:
    directory = tmp_path / "run"
    child: Any = SimpleNamespace(run=run, path=directory, stopped=False)
    state = SweepRunner([run], SweepDirectory(tmp_path))
    state.running = [child]
    assert describe(state) == "ring sce seed=1 starting"
    directory.mkdir()
    record = '{"epoch": 3, "validation": {"ndcg@10": 0.0412}}\n'
    (directory / "metrics.jsonl").write_text(record + '{"epoch": 4, "val')  # being written
    good = make_row("a", {"loss.name": "ce"}, data="ring", validation=0.05)
    bad = make_row("b", {"loss.name": "sce"}, data="ring") | NEVER | {"status": "failed"}
    state.rows = {"a": good, "b": bad | {"validation": None}}
    assert describe(state) == (
        "ring sce seed=1 epoch 3/100 ndcg@10 0.0412; 1 failed; "
        "best validation ndcg@10: ring 0.0500 by ce"
    )
    child.stopped = True
    assert "ring sce seed=1 saving" in describe(state)


def test_without_a_terminal_a_line_for_each_end(
    tmp_path: Path, run: PlannedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    state = SweepRunner([], SweepDirectory(tmp_path))
    state.total = 3
    row = make_row("a", {"loss.name": "ce"}, validation=0.05, test=0.06)
    with SweepDisplay() as display:
        state.rows["a"] = row
        display.ended(state, run, row)
        state.rows["b"] = row | NEVER | {"status": "failed"}
        display.ended(state, run, state.rows["b"])
        display.ended(state, run, None)
        state.waiting.append(run)
        display.ended(state, run, None)
        display.looked(state)
    assert capsys.readouterr().err.splitlines() == [
        "sce: [1/3] ring sce seed=1: validation ndcg@10 0.0500, test ndcg@10 0.0600, 500 MiB, 38 s",
        "sce: [2/3] ring sce seed=1: out of memory: memory ran out (3 <GiB>)",
        "sce: [2/3] ring sce seed=1: stopped for now",
        "sce: [2/3] ring sce seed=1: found no memory beside others; tries again alone, after them",
    ]
