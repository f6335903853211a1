"""The files under experiments/: each can be planned, and the README has a command for it."""

from pathlib import Path

import pytest

from sce.experiments.datasets import Dataset, Synthetic
from sce.experiments.spec import load_sweep, make_plan, parse_overrides
from sce.experiments.store import read_rows
from tests.cycle_data import make_cycle

FOLDER = Path(__file__).parents[2] / "experiments"
FILES = sorted(FOLDER.glob("*.toml"))


def test_there_is_one_for_each_figure_and_table() -> None:
    assert {file.stem for file in FILES} == {
        "alpha-beta", "beauty-table", "bert4rec", "bucket-size", "catalogue-memory", "centres",
        "coverage", "default", "field", "hard-negatives", "hstu", "ligr", "main-table",
        "memory-components", "mix", "pareto",
    }  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_runs_on_any_prepared_dataset_and_on_its_own(file: Path, tmp_path: Path) -> None:
    settings = load_sweep(file)
    assert any(entry.synthetic is not None for entry in settings.datasets.values())
    names = ["other", *settings.datasets]  # each also with the settings that a name brings
    prepared = make_cycle(tmp_path / "data", items=400)
    for name in names:
        runs = make_plan(settings, [Dataset.of(name, prepared)]).runs
        assert 2 <= len(runs) <= 70
    assert settings.figures
    assert f"sce sweep experiments/{file.name} " in (FOLDER / "README.md").read_text()


def test_all_files_can_share_one_directory_without_data() -> None:
    """Datasets of one name are made once: they must be alike."""
    made: dict[str, Synthetic] = {}
    for file in FILES:
        for name, entry in load_sweep(file).datasets.items():
            if entry.synthetic is not None:
                assert made.setdefault(name, entry.synthetic) == entry.synthetic, (file, name)
    assert len(made) > 2


def test_the_main_table_and_the_fronts_share_their_runs(tmp_path: Path) -> None:
    data = [Dataset.of("ml1m", make_cycle(tmp_path / "data", items=4000))]
    keys = {
        name: {run.key for run in make_plan(load_sweep(FOLDER / f"{name}.toml"), data).runs}
        for name in ("main-table", "pareto", "bucket-size", "centres")
    }
    assert keys["main-table"] < keys["pareto"]
    assert len(keys["bucket-size"] & keys["main-table"]) == 12
    assert len(keys["centres"] & keys["main-table"]) == 6


@pytest.mark.parametrize("name", ["ml1m", "beauty", "globo"])
def test_a_sweep_goes_on_from_the_rows_that_are_kept(name: str) -> None:
    """Whoever adds a setting adds it to these rows: their keys follow from all settings."""
    rows = {row["key"]: row for row in read_rows(FOLDER / "results" / f"{name}.jsonl")}
    data = next(iter(rows.values()))["dataset"]
    dataset = Dataset(name, Path(), data["content_hash"], data["n_items"])
    over = parse_overrides(["training.precision=bf16", "training.compile=true"])
    planned = make_plan(load_sweep(FOLDER / "main-table.toml"), [dataset], over=over).runs
    assert {run.key for run in planned} <= set(rows)


@pytest.mark.parametrize("file", sorted((FOLDER / "results" / "default").glob("*.jsonl")))
def test_the_kept_rows_of_the_default_are_those_of_its_file(file: Path) -> None:
    rows = {row["key"]: row for row in read_rows(file)}
    data = next(iter(rows.values()))["dataset"]
    dataset = Dataset(file.stem, Path(), data["content_hash"], data["n_items"])
    over = parse_overrides(["training.precision=bf16"])
    planned = make_plan(load_sweep(FOLDER / "default.toml"), [dataset], over=over).runs
    assert {run.key for run in planned} <= set(rows)
