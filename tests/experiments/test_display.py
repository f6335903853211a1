import io
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from sce.config import Config
from sce.experiments.datasets import Dataset
from sce.experiments.display import SweepDisplay, draw
from sce.experiments.plan import PlannedRun, flatten
from sce.experiments.state import State
from tests.cycle_data import make_cycle
from tests.experiments.made_rows import NEVER, make_row


@pytest.fixture
def run(tmp_path: Path) -> PlannedRun:
    config = Config()
    dataset = Dataset("ring", make_cycle(tmp_path / "data"))
    return PlannedRun("key", dataset, config, flatten(config), "ring sce seed=1")


def shown(state: State) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(draw(state, jobs=2))
    return " ".join(cast("io.StringIO", console.file).getvalue().split())


def test_what_runs_what_is_done_and_the_best(tmp_path: Path, run: PlannedRun) -> None:
    directory = tmp_path / "run"
    child: Any = SimpleNamespace(run=run, directory=directory, seconds=12.0, stopped=False)
    state = State(total=9, begun=time.monotonic() - 90, deadline=time.monotonic() + 300,
                  waiting=deque([run]), running=[child])  # fmt: skip
    assert "ring sce seed=1 starting" in shown(state)
    directory.mkdir()
    record = '{"epoch": 3, "validation": {"ndcg@10": 0.0412}}\n'
    (directory / "metrics.jsonl").write_text(record + '{"epoch": 4, "val')  # being written
    good = make_row("a", {"loss.name": "ce"}, data="ring", validation=0.05)
    bad = make_row("b", {"loss.name": "sce"}, data="ring") | NEVER | {"status": "failed"}
    state.rows = {"a": good, "b": bad | {"validation": None}}
    text = shown(state)
    assert "epoch 3/100 ndcg@10 0.0412 12 s" in text
    assert "1 of 9 finished, 1 failed, 1 running, 1 waiting, 1 min 30 s so far" in text
    assert "stops in 5 min 00 s" in text or "stops in 4 min 59 s" in text
    assert "best validation ndcg@10 so far: ring 0.0500 by ce" in text
    assert "left" not in text  # nothing is known yet about how long such a run takes
    state.stopping, child.stopped = "interrupted", True
    assert "interrupted: 1 still saving" in shown(state)
    assert "ring sce seed=1 saving" in shown(state)


def test_without_a_terminal_a_line_for_each_end(
    run: PlannedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    state = State(total=3, begun=0.0, deadline=None, waiting=deque())
    row = make_row("a", {"loss.name": "ce"}, validation=0.05, test=0.06)
    with SweepDisplay(1) as display:
        state.rows["a"] = row
        display.ended(state, run, row)
        state.rows["b"] = row | NEVER | {"status": "failed"}
        display.ended(state, run, state.rows["b"])
        display.ended(state, run, None)
        state.waiting.append(run)
        display.ended(state, run, None)
        display.put_off(state, [run], 42.0, 15.0)
        display.put_off(state, [run, run], 90.0, 15.0)
        display.looked(state)
    assert capsys.readouterr().err.splitlines() == [
        "sce: [1/3] ring sce seed=1: validation ndcg@10 0.0500, test ndcg@10 0.0600, 500 MiB, 38 s",
        "sce: [2/3] ring sce seed=1: out of memory: memory ran out (3 <GiB>)",
        "sce: [2/3] ring sce seed=1: stopped for now",
        "sce: [2/3] ring sce seed=1: found no memory beside others; tries again alone, after them",
        "sce: not started: ring sce seed=1 is expected to take 42 s, and 15 s are left",
        "sce: not started: 2 runs; the shortest is expected to take 1 min 30 s, and 15 s are left",
    ]
