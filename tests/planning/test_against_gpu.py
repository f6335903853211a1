"""Predictions against peaks of training on an H200, as torch's allocator counted them.

Sizes of all kinds are those of benchmarks/results/plan_grid.jsonl; whole trainings are those of
experiments/results/default, in bf16; steps of large catalogues are those of
experiments/results/memory.jsonl. There buckets have the sizes of the time: alpha 2, a fortieth of
the catalogue, 64 to 4,096 items, with row-wise updates 256 at most.
"""

import json
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from plan_cells import job_of
from sce.models.sasrec import SASRecSettings
from sce.planning import ERROR, PLANNED, ROW_WISE, Job, predict

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
    "steam": (8.085, 9.594, (0.0607, 0.1471, 0.3034), 10_369, 106_086),
    "yoochoose_buys": (3.774, 2.734, (0.0016, 0.0114, 0.0661), 43_107, 206_016),
    "reddit": (19.94, 13.97, (0.3646, 0.6172, 0.7753), 14_486, 289_020),
    "yelp2019": (7.155, 8.373, (0.0461, 0.1269, 0.2649), 30_431, 255_492),
}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def bucket_size_of_the_time(items: int, *, row_wise: bool) -> int:
    return min(items, max(64, min(256 if row_wise else 4096, round(items / 40))))


def test_the_error_that_is_stated_is_that_of_the_grid() -> None:
    rows = read(ROWS)
    assert {row["loss"] for row in rows} == set(PLANNED)
    found = [
        (row, predict(job_of(row), row["loss"]).total / 2**20 / row["peak MiB"] - 1) for row in rows
    ]
    # GRU4Rec's in bf16 were measured in float16, and are gone.
    largest = {"gru4rec": 0.13, "hstu": 0.11}  # too much, where batches have few positions
    assert all(-0.063 < error < largest.get(row.get("backbone", ""), 0.063) for row, error in found)
    errors = [abs(error) for _, error in found]
    assert len(errors) == ERROR["sizes"]
    assert max(errors) == pytest.approx(ERROR["largest"], abs=1e-3)
    assert mean(errors) == pytest.approx(ERROR["mean"], abs=1e-3)


@pytest.mark.parametrize("loss", ["ce", "sce"])
@pytest.mark.parametrize("data", DATA)
def test_the_peak_of_a_training(data: str, loss: str) -> None:
    rows = [
        row
        for row in read(TRAININGS / f"{data}.jsonl")
        if (row["settings"]["model.name"], row["settings"]["loss.name"]) == ("sasrec", loss)
        and row["seed"] > 2  # in those before, a captured batch of CE had room for more targets
    ]
    assert len(rows) == 3
    settings, items = rows[0]["settings"], rows[0]["dataset"]["n_items"]
    mean_length, spread, longer, users, events = DATA[data]
    peaks = [row["memory_mib"]["training"] for row in rows]
    job = Job(
        items,
        settings["training.batch_size"],
        SASRecSettings(max_length=settings["model.max_length"]),
        settings["training.precision"],
        mean_length=mean_length,
        length_spread=spread,
        longer=longer,
        users=users,
        events=events,
    )
    # The kernels of SCE took up to a seventh more when they were measured.
    least = 6 / 7 if loss == "sce" else 0.94
    assert least < predict(job, loss).total / 2**20 / median(peaks) < 1.06


def test_recorded_steps_of_every_loss() -> None:
    finished = [row for row in read(MEMORY) if row["status"] == "finished"]
    assert len(finished) == 52
    for row in finished:
        settings, items = row["settings"], row["dataset"]["n_items"]
        row_wise = settings["training.row_wise"]
        size = settings.get("loss.bucket_size_y")
        size = bucket_size_of_the_time(items, row_wise=row_wise) if size is None else size
        job = Job(
            items,
            settings["training.batch_size"],
            options={"alpha": 2.0, "bucket_size_y": size},
            users=2_560,
            events=2_560 * 201,
        )
        predicted = predict(job, ROW_WISE if row_wise else settings["loss.name"]).total / 2**20
        # BCE added targets and negatives together when it was measured: a tenth more.
        least = 0.9 if settings["loss.name"] == "bce" else 0.95
        assert least < predicted / row["memory_mib"]["training"] < 1.05, row["run"]
