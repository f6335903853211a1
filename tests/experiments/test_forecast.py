from pathlib import Path
from typing import Any

import pytest

from sce.config import Config
from sce.data.parts import shares_longer
from sce.experiments.datasets import Dataset, Synthetic, synthesize
from sce.experiments.forecast import Forecast, predicted_mib
from sce.experiments.plan import PlannedRun, flatten
from sce.experiments.rows import Row
from sce.planning import Job, predict
from tests.experiments.made_rows import make_row

ITEMS, BATCH, LENGTH = 20_000, 32, 50


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    wanted = Synthetic(items=ITEMS, users=64, mean_events=60, min_events=60, test_users=0)
    return synthesize("made", wanted, tmp_path_factory.mktemp("data") / "made")


def planned(
    made: Dataset, loss: str, sizes: dict[str, int] | None = None, **training: Any
) -> PlannedRun:
    config = Config.compose(
        {
            "model": {"max_length": LENGTH},
            "loss": {"name": loss, **(sizes or {})},
            "training": {"batch_size": BATCH, **training},
        }
    )
    return PlannedRun("key", made, config, flatten(config), "it")


def row_of(run: PlannedRun, **changes: Any) -> Row:
    row = make_row("x", run.settings, seed=run.config.training.seed, **changes)
    return row | {"dataset": {"content_hash": run.dataset.content_hash}}


def test_full_softmax_is_foreseen_to_take_its_logits(made: Dataset) -> None:
    logits = BATCH * LENGTH * ITEMS * 4 / 2**20
    bce, ce, sce = (predicted_mib(planned(made, loss)) for loss in ("bce", "ce", "sce"))
    assert 2 * logits < ce - bce < 6 * logits
    assert sce < ce - logits


def test_the_lengths_of_the_histories_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = []

    def listen(job: Job, *others: Any) -> Any:
        jobs.append(job)
        return predict(job, *others)

    monkeypatch.setattr("sce.experiments.forecast.predict", listen)
    wanted = Synthetic(items=ITEMS, users=64, mean_events=8, min_events=3, test_users=0)
    short = synthesize("short", wanted, tmp_path / "short")
    predicted_mib(planned(short, "bce"))
    lengths = (short.prepared.train.lengths - 1).clip(max=LENGTH)
    (job,) = jobs
    assert job.length == lengths.max()
    assert job.mean_length == pytest.approx(lengths.mean())
    assert job.longer == tuple(shares_longer(lengths, job.length))
    assert len(job.parts) > 1


def test_sizes_of_buckets_count_where_they_are_given(made: Dataset) -> None:
    few, many, wide = (
        predicted_mib(planned(made, "sce", {"n_buckets": n, "bucket_size_x": size}))
        for n, size in ((100, 100), (20_000, 100), (20_000, 1500))
    )
    assert few < many < wide
    assert wide - few > 20_000 * 1500 * 4 / 2**20  # at least a number for each place in a bucket


def test_a_cpu_has_no_context_of_a_gpu(made: Dataset) -> None:
    cpu, gpu = (predicted_mib(planned(made, "bce", device=name)) for name in ("cpu", "cuda:0"))
    assert 350 < cpu < 450
    assert gpu > cpu + 250
    row = row_of(planned(made, "bce", device="cpu", seed=7), memory=416.0)
    resident = row | {"memory_measured": "resident memory of the process"}
    assert Forecast([resident]).mib(planned(made, "bce", device="cpu")) == 416.0


def test_another_seed_knows_better(made: Dataset) -> None:
    run = planned(made, "ce", device="cuda")
    unknown = Forecast().mib(run)
    known = Forecast([row_of(planned(made, "ce", device="cuda", seed=7), memory=5.0)]).mib(run)
    assert known < unknown
    other = Forecast([row_of(planned(made, "ce", device="cuda", batch_size=31), memory=5.0)])
    assert other.mib(run) == unknown


def test_resident_memory_is_of_the_whole_process_already(made: Dataset) -> None:
    run = planned(made, "ce")
    row = row_of(planned(made, "ce", seed=7), memory=5000.0)
    resident = row | {"memory_measured": "resident memory of the process"}
    assert Forecast([resident]).mib(run) == 5000.0
    assert Forecast([row]).mib(run) == 5600.0  # and the context of the GPU


def test_steps_tell_nothing_about_trainings(made: Dataset) -> None:
    run = planned(made, "ce")
    few = row_of(planned(made, "ce", seed=7), memory=5.0, measure="steps")
    assert Forecast([few]).mib(run) == Forecast().mib(run)


def test_time_is_that_of_the_runs_most_alike(made: Dataset, tmp_path: Path) -> None:
    run = planned(made, "ce")
    forecast = Forecast()
    assert forecast.seconds(run) is None
    forecast.learn(row_of(planned(made, "sce"), wall_seconds=50.0))
    assert forecast.seconds(run) == 50.0
    forecast.learn(row_of(planned(made, "ce", batch_size=9), wall_seconds=10.0))
    forecast.learn(row_of(planned(made, "ce", batch_size=8), wall_seconds=20.0))
    assert forecast.seconds(run) == 15.0
    failed = row_of(planned(made, "ce"), wall_seconds=900.0) | {"status": "failed"}
    forecast.learn(failed)
    assert forecast.seconds(run) == 15.0


def test_what_cannot_be_is_left_to_say_so_itself(made: Dataset) -> None:
    assert predicted_mib(planned(made, "sce", {"alpha": 10**9})) == 0.0
