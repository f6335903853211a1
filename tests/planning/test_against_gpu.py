"""The formula against peaks of training on an H200, as torch's allocator counted them.

Whole trainings are those of experiments/results/default, compiled and in bf16; the sizes are those
of their datasets. Sizes of all kinds are those of benchmarks/results/plan_grid.jsonl; steps of
large catalogues are those of experiments/results/memory.jsonl.
"""

import json
from pathlib import Path
from statistics import mean, median

import pytest

from sce.planning import LOSSES, Job, LossName, predict
from sce.planning.coefficients import H200
from sce.planning.formula import ROW_WISE
from tests.planning.grid_rows import job_of

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks" / "results" / "plan_grid.jsonl"
TRAININGS = ROOT / "experiments" / "results" / "default"
MEMORY = ROOT / "experiments" / "results" / "memory.jsonl"

# Mean and deviation of the lengths, the shares of long histories, users and events.
DATA = {
    "ml1m": (99.95, 66.51, (0.4224, 0.6568, 0.8957), 5_227, 724_964),
    "globo": (31.76, 15.87, (0.0081, 0.0949, 0.545), 19_212, 630_253),
    "beauty": (5.725, 6.691, (0.0252, 0.0769, 0.1897), 22_363, 153_776),
    "food": (61.49, 55.91, (0.1823, 0.3685, 0.6894), 5_074, 431_053),
    "beauty2": (5.635, 6.427, (0.0225, 0.0732, 0.1902), 40_226, 273_510),
    "union7": (36.18, 30.90, (0.0456, 0.1537, 0.4936), 12_291, 476_237),
}


@pytest.mark.parametrize("loss", ["sce", "ce"])
@pytest.mark.parametrize("data", DATA)
def test_the_peak_of_a_training(data: str, loss: LossName) -> None:
    rows = [json.loads(line) for line in (TRAININGS / f"{data}.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["settings"]["loss.name"] == loss]
    assert len(rows) == 3
    settings = rows[0]["settings"]
    mean_length, spread, longer, users, events = DATA[data]
    job = Job(
        rows[0]["dataset"]["n_items"],
        batch=settings["training.batch_size"],
        length=settings["model.max_length"],
        precision=settings["training.precision"],
        mean_length=mean_length,
        length_spread=spread,
        longer=longer,
        users=users,
        events=events,
    )
    measured = median(row["memory_mib"]["training"] for row in rows)
    predicted = predict(job, loss).total / 2**20
    assert predicted == pytest.approx(measured, rel=0.1)


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
