"""The formula against the bytes of the tensors that a training step makes, counted."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sce.planning import LOSSES, predict
from sce.planning.coefficients import H200
from tests.planning.grid_rows import job_of

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
NOT_COUNTED = replace(H200, workspace=0.0)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """Rows of `benchmarks/plan_grid.py`, counted on the CPU, and what it printed."""
    out = tmp_path_factory.mktemp("plan") / "rows.jsonl"
    options = ["--device", "cpu", "--cells", "1", "1", "--at-most", "150MB", "--fit"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", BENCHMARKS / "plan_grid.py", *options, "--out", out],
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{BENCHMARKS}", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()], done.stdout


def test_every_loss_is_predicted_as_it_is_counted(
    grid: tuple[list[dict[str, Any]], str],
) -> None:
    rows, _ = grid
    assert {row["loss"] for row in rows} == set(LOSSES)
    for row in rows:
        predicted = predict(job_of(row), row["loss"], NOT_COUNTED).total / 2**20
        assert predicted == pytest.approx(row["peak MiB"], rel=0.2), row


def test_a_fit_says_how_far_off_it_is(grid: tuple[list[dict[str, Any]], str]) -> None:
    _, printed = grid
    assert "| held out | all | 10 |" in printed
    assert "H200 = Calibration(" in printed
