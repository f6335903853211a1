"""The formula against peaks of training on an H200, as torch's allocator counted them.

Whole trainings are those of benchmarks/results/parity.jsonl, with the sink, in float32; the sizes
are those of their datasets. Sizes of all kinds are those of benchmarks/results/plan_grid.jsonl;
steps of large catalogues are those of experiments/results/memory.jsonl.
"""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from sce.planning import LOSSES, Job, LossName, predict
from sce.planning.coefficients import H200
from sce.planning.formula import ROW_WISE
from tests.planning.grid_rows import job_of

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks" / "results" / "plan_grid.jsonl"
MEMORY = ROOT / "experiments" / "results" / "memory.jsonl"

JOBS = {
    "ml1m": Job(3_411, mean_length=99.95, length_spread=66.51, users=5_227, events=724_964),
    "globo": Job(11_282, mean_length=31.76, length_spread=15.87, users=19_212, events=630_253),
    "beauty": Job(
        12_101,
        batch=1024,
        length=50,
        mean_length=5.725,
        length_spread=6.691,
        users=22_363,
        events=153_776,
    ),
}


@pytest.mark.parametrize(
    ("data", "loss", "mib"),
    [
        ("ml1m", "sce", 253.9),
        ("globo", "sce", 257.9),
        ("ml1m", "ce", 825.1),
        ("globo", "ce", 847.1),
        ("beauty", "ce", 1313.8),
        ("ml1m", "ce-", 314.8),
        ("globo", "ce-", 286.0),
    ],
)
def test_the_peak_of_a_training(data: str, loss: LossName, mib: float) -> None:
    job = replace(JOBS[data], bucket_size_y=256)
    assert predict(job, loss).total / 2**20 == pytest.approx(mib, rel=0.1)


def test_the_error_that_is_stated_is_that_of_sizes_not_fitted() -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    held_out = [row for row in rows if row["part"] == "held out"]
    errors = {
        loss: [
            abs(predict(job_of(row), loss).total / 2**20 / row["peak MiB"] - 1)
            for row in held_out
            if row["loss"] == loss
        ]
        for loss in LOSSES
    }
    assert all(errors.values())
    found = [error for some in errors.values() for error in some]
    assert len(found) == H200.cells
    assert max(found) == pytest.approx(H200.largest_error, abs=1e-3)
    assert mean(found) == pytest.approx(H200.mean_error, abs=1e-3)
    assert max(found) < 0.15


def test_recorded_steps_of_every_loss() -> None:
    rows = [json.loads(line) for line in MEMORY.read_text().splitlines()]
    finished = [row for row in rows if row["status"] == "finished"]
    assert len(finished) == 52
    for row in finished:
        settings = row["settings"]
        job = Job(
            row["dataset"]["n_items"],
            batch=settings["training.batch_size"],
            users=2_560,
            events=2_560 * 201,
            bucket_size_y=settings.get("loss.bucket_size_y"),
        )
        loss = ROW_WISE if settings["training.row_wise"] else settings["loss.name"]
        predicted = predict(job, loss).total / 2**20
        assert predicted == pytest.approx(row["memory_mib"]["training"], rel=0.05), row["run"]
