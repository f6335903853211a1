import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from sce.data.storage import LOCK, append_json_line, locked, write_json
from sce.errors import InputError
from sce.experiments.datasets import Dataset
from sce.experiments.figure_spec import FigureSpec
from sce.experiments.runner import Child
from sce.experiments.spec import PlannedRun, load_sweep, make_plan
from sce.experiments.store import FAILED, Sweep, SweepDirectory, planned_row, read_rows
from sce.recommend import Recommender
from sce.training.run import Run
from tests.cycle_data import make_cycle
from tests.experiments.made_rows import make_row, write_place
from tests.tiny_run import make_dataset, make_run

CE = {"loss.name": "ce"}
FIGURE = FigureSpec("table", by=("loss.centres",), published=({"name": "x", "hr@10": 0.1},))


@pytest.fixture
def place(tmp_path: Path) -> SweepDirectory:
    made = SweepDirectory(tmp_path / "sweep")
    made.make()
    return made


def test_sweeps_are_remembered(place: SweepDirectory) -> None:
    first = Sweep("a", "A", ("1", "2"), (FIGURE,))
    place.write_sweep(first)
    place.write_sweep(Sweep("b", "B", (), (), "steps"))
    assert place.read_sweeps() == [first, Sweep("b", "B", (), (), "steps")]
    place.make()  # again: nothing is lost
    assert len(place.read_sweeps()) == 2


def test_the_same_settings_on_other_data_are_added(place: SweepDirectory) -> None:
    first = Sweep("a", "A", ("1", "2"), (), file="/x/a.toml", variant="v")
    assert place.write_sweep(first) == 0
    assert place.write_sweep(replace(first, keys=("2", "3"), title="B")) == 0
    (found,) = place.read_sweeps()
    assert (found.keys, found.title) == (("1", "2", "3"), "B")
    assert place.write_sweep(replace(first, file="/y/a.toml", keys=("1",))) == 0  # it moved
    edited = replace(first, file="/y/a.toml", keys=("3", "9"), variant="w")
    assert place.write_sweep(edited) == 2  # those without 3
    assert place.read_sweeps() == [edited]
    with pytest.raises(InputError, match=r"runs of /y/a.toml, with other settings under the same"):
        place.write_sweep(first)


def test_what_is_no_place_for_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "dear").write_text("dear")
    with pytest.raises(InputError, match="holds other things"):
        SweepDirectory(tmp_path).check()
    with pytest.raises(InputError, match="is a file"):
        SweepDirectory(tmp_path / "dear").check()
    with pytest.raises(InputError, match="does not exist"):
        SweepDirectory(tmp_path / "none").read_sweeps()
    mine = tmp_path / "mine"
    for name in ("data", "runs", "sweeps/clicks"):
        (mine / name).mkdir(parents=True)
    with pytest.raises(InputError, match="holds other things"):
        SweepDirectory(mine).check()
    place = SweepDirectory(tmp_path / "new")
    place.make()
    place.check()
    with pytest.raises(InputError, match="not of a sweep: it has no"):
        SweepDirectory(tmp_path).read_sweeps()


@pytest.mark.parametrize(
    ("content", "message"),
    [({"format": "sce run"}, "is not of a sweep"),
     ({"format": "sce sweep", "version": 1}, "has version 1; this sce reads 2")],
)  # fmt: skip
def test_what_is_of_something_else(
    place: SweepDirectory, content: dict[str, object], message: str
) -> None:
    write_json(place.path / "sweeps" / "a.json", content)
    with pytest.raises(InputError, match=message):
        place.read_sweeps()


def test_a_figure_that_cannot_be_is_named_and_can_be_mended(place: SweepDirectory) -> None:
    sweep = Sweep("a", "A", ("1",), (FigureSpec("table"),))
    place.write_sweep(sweep)
    file = place.path / "sweeps" / "a.json"
    write_json(file, json.loads(file.read_text().replace("loss.name", "loss.nmae")))
    with pytest.raises(InputError, match=r"a.json: by: loss.nmae is unknown"):
        place.read_sweeps()
    place.write_sweep(sweep)
    assert place.read_sweeps() == [sweep]


def test_a_row_has_the_split_of_its_data(tmp_path: Path) -> None:
    dataset = Dataset.of("ring", make_dataset(tmp_path / "data"))
    planned = PlannedRun("a", dataset, CE | {"training.seed": 0})
    row = planned_row(planned, FAILED, 1, None) | {"failure": {"kind": "diverged", "message": ""}}
    assert row["dataset"]["split"] == "leave-one-out"


def test_runs_on_one_dataset_share_their_ids(place: SweepDirectory, tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data")
    runs = [make_run(place.runs / name, dataset) for name in ("a", "b", "c")]
    (name,) = [file.name for file in runs[0].path.glob("items_*.npy")]
    place.trim(runs[0].path, weights=False)
    place.trim(runs[1].path, weights=False)
    place.trim(runs[1].path, weights=False)
    place.trim(runs[2].path, weights=True)
    first, second, third = (run.path / name for run in runs)
    assert first.samefile(second)
    assert not first.samefile(third)
    assert len(Run.open(runs[1].path).item_ids) == 40  # still what it was
    assert [run.best_weights.exists() for run in runs] == [False, False, True]


def test_a_run_without_its_weights_says_who_removed_them(
    place: SweepDirectory, tmp_path: Path
) -> None:
    dataset = make_dataset(tmp_path / "data")
    kept, trimmed, young = (
        make_run(place.runs / name, dataset, weights=name != "young")
        for name in ("kept", "trimmed", "young")
    )
    place.trim(kept.path, weights=True)
    place.trim(trimmed.path, weights=False)
    place.trim(young.path, weights=False)
    Recommender.load(kept.path, "cpu")
    with pytest.raises(InputError, match="no weights any more: sce sweep removed them"):
        Recommender.load(trimmed.path, "cpu")
    with pytest.raises(InputError, match="no weights yet"):
        Recommender.load(young.path, "cpu")


def test_what_is_damaged_is_made_small_too(place: SweepDirectory) -> None:
    directory = place.runs / "a"
    directory.mkdir()
    (directory / "run.json").write_text("{")
    (directory / "best.safetensors").touch()
    place.trim(directory, weights=False)
    assert not (directory / "best.safetensors").exists()


def test_of_two_rows_about_one_run_the_later_counts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [make_row(key, CE, n=n) for key, n in (("a", 1), ("b", 2), ("a", 3))]
    for row in rows:
        append_json_line(file, row)
    assert read_rows(file) == [rows[2], rows[1]]
    assert len(file.read_text().splitlines()) == 3


@pytest.mark.parametrize("cut", [1, 5, 10])  # the last within a letter
def test_a_row_that_was_cut_off_harms_no_other(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "rows.jsonl"
    append_json_line(file, make_row("a\u2028", CE))
    with file.open("ab") as out:
        out.write('{"key": "ä"}'.encode()[:cut])
    assert [row["key"] for row in read_rows(file)] == ["a\u2028"]
    append_json_line(file, make_row("c", CE))
    assert [row["key"] for row in read_rows(file)] == ["a\u2028", "c"]


def test_every_flipped_bit_of_rows_and_sweeps_is_found(tmp_path: Path) -> None:
    made = [make_row(key, CE, measure="steps") for key in "ab"]
    rows = [{name: row[name] for name in list(row)[:10]} for row in made]
    place = write_place(tmp_path / "sweep", rows)
    tried = 0
    for file in (place.rows, place.path / "sweeps" / "main.json"):
        whole = file.read_bytes()
        for at in range(len(whole)):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
            with pytest.raises(InputError, match=re.escape(str(file))):
                read_rows(place.rows), place.read_sweeps()
            tried += 1
        file.write_bytes(whole)
    assert len(read_rows(place.rows)) == 2
    print(f"{tried} flipped bits")


def test_a_link_in_a_shared_directory_leads_nowhere(tmp_path: Path, cycle: Dataset) -> None:
    """Somebody else who can write there must not have us overwrite a file of ours."""
    dear = tmp_path / "dear"
    dear.write_text("dear")
    place = write_place(tmp_path / "sweep", [])
    (run,) = make_plan(load_sweep(write(tmp_path / "mine.toml")), [cycle]).runs
    for link, opened in (
        (place.rows, lambda: append_json_line(place.rows, {"key": "a"})),
        (place.runs / f"{run.name}.log", lambda: Child(run, place.runs, anew=False, lock=None)),
        (place.path / LOCK, lambda: locked(place.path).__enter__()),
    ):
        link.unlink(missing_ok=True)
        link.symlink_to(dear)
        with pytest.raises(InputError, match="is a symbolic link"):
            opened()
        link.unlink()
    settings = place.runs / f"{run.name}.toml"
    settings.unlink()
    settings.symlink_to(dear)  # written anew, in its place
    with suppress(InputError):
        Child(run, place.runs, anew=False, lock=None).kill()
    assert not settings.is_symlink()
    assert dear.read_text() == "dear"


@pytest.fixture
def cycle(tmp_path: Path) -> Dataset:
    return Dataset.of("cycle", make_cycle(tmp_path / "cycle"))


def write(file: Path, text: str = "") -> Path:
    file.write_text(text)
    return file
