from pathlib import Path

from sce.experiments.store import row_of
from sce.report.comparison import gather
from tests.experiments.made_rows import NEVER, make_row, write_place
from tests.tiny_run import make_dataset, make_run, write_result


def test_three_variants_under_one_name_in_directories_of_one_name(tmp_path: Path) -> None:
    places = []
    for place, rate in (("x", 0.1), ("y", 0.2), ("z", 0.3)):
        row = make_row(place, {"loss.name": "ce", "training.learning_rate": rate}, test=rate)
        places.append(write_place(tmp_path / place / "sw", [row], name="q", variant=place).path)
    found = gather(places)
    assert [one.groups[0].mean("test.ndcg@10") for one in found] == [0.1, 0.2, 0.3]
    assert [one.sweep.title for one in found] == [f"The <q> sweep ({path})" for path in places]


def test_one_variant_in_several_directories_is_one_over_seeds(tmp_path: Path) -> None:
    for place, variant, seeds in (("x", "a", (0, 1)), ("y", "b", (0,)), ("z", "a", (1, 2))):
        rows = [make_row(f"{variant}{seed}", {"loss.name": "ce"}, seed=seed) for seed in seeds]
        write_place(tmp_path / place, rows, variant=variant)
    first, second = gather([tmp_path / place for place in ("x", "y", "z")])
    assert [row["seed"] for row in first.groups[0].rows] == [0, 1, 2]
    assert first.sweep.keys == ("a0", "a1", "a2")
    assert first.sweep.title == f"The <main> sweep ({tmp_path / 'x'}, {tmp_path / 'z'})"
    assert len(second.groups[0].rows) == 1


def test_a_run_that_failed_here_and_finished_there_finished(tmp_path: Path) -> None:
    row = make_row("a", {"loss.name": "ce"}, test=0.5)
    write_place(tmp_path / "x", [row | {"status": "failed"} | NEVER])
    write_place(tmp_path / "y", [row])
    for order in (("x", "y"), ("y", "x")):
        (found,) = gather([tmp_path / place for place in order])
        assert [row["status"] for row in found.rows] == ["finished"]
        assert found.groups[0].mean("test.ndcg@10") == 0.5


def test_runs_that_differ_in_seed_and_saving_are_one_column(tmp_path: Path) -> None:
    """One of them failed in a sweep, and was trained again."""
    data = make_dataset(tmp_path / "data")
    runs = [
        make_run(tmp_path / f"{n}", data, seed=n, save_minutes=1.0 + n, weights=False)
        for n in (0, 1)
    ]
    for run in runs:
        write_result(run)
    (found,) = gather([run.path for run in runs])
    assert found.sweep.figures[0].by == ("loss.name",)
    assert [len(one.rows) for one in found.groups] == [2]
    failed = row_of(runs[0].path) | {"run": "x", "status": "failed"} | NEVER
    swept = write_place(tmp_path / "swept", [failed])
    first, _ = gather([swept.path, *(run.path for run in runs)])
    assert [row["status"] for row in first.rows] == ["finished"] * 2
