import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sce.config import Config, check_layer
from sce.errors import InputError
from sce.experiments.datasets import Dataset, open_datasets
from sce.experiments.spec import PlannedRun, SweepSpec, join_plans, load_sweep, make_plan
from tests.cycle_data import make_cycle


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset.of("cycle", make_cycle(tmp_path_factory.mktemp("data") / "cycle", items=40))


def sweep(tmp_path: Path, text: str) -> SweepSpec:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return load_sweep(file)


def plan(tmp_path: Path, text: str, *datasets: Dataset, **options: Any) -> tuple[PlannedRun, ...]:
    return join_plans([make_plan(sweep(tmp_path, text), datasets, **options)])


GRID = """
seeds = [0, 1]
[[grid]]
loss.name = "sce"
loss.bucket_size_y = [4, "50% of items"]
training.batch_size = [8, 16]
[[grid]]
loss.name = ["ce-", "gbce"]
loss.n_negatives = 3
"""


def test_what_datasets_decide_is_among_the_settings(tmp_path: Path, cycle: Dataset) -> None:
    (left_open,) = plan(tmp_path, "[[grid]]\nloss.name = 'sce'\n", cycle)
    assert left_open.settings["loss.bucket_size_y"] == 40
    for size in (40, 2048):
        assert plan(tmp_path, f"[base]\nloss.bucket_size_y = {size}", cycle)[0].key == left_open.key


def test_runs_are_named_by_what_each_dataset_decided(tmp_path: Path, cycle: Dataset) -> None:
    large = Dataset.of("large", make_cycle(tmp_path / "large", items=50))
    text = "[datasets.large]\nmodel.dim = 32\n[[grid]]\nloss.name = 'sce'"
    labels = [run.label for run in plan(tmp_path, text, cycle, large)]
    assert labels == ["cycle sce bucket_size_y=40", "large sce bucket_size_y=50"]


def test_the_product_of_each_grid_seed_by_seed(tmp_path: Path, cycle: Dataset) -> None:
    runs = plan(tmp_path, GRID, cycle)
    found = [
        (
            run.settings["training.seed"],
            run.settings["loss.name"],
            run.settings.get("loss.bucket_size_y") or run.settings["loss.n_negatives"],
            run.settings["training.batch_size"],
        )
        for run in runs
    ]
    one = [("sce", y, b) for y in (4, 20) for b in (8, 16)] + [("ce-", 3, 128), ("gbce", 3, 128)]
    assert found == [(seed, *rest) for seed in (0, 1) for rest in one]
    assert runs[0].label == "cycle sce bucket_size_y=4 batch_size=8 seed=0"
    assert runs[4].label == "cycle ce- seed=0"
    assert len({run.key for run in runs}) == len(runs)


def test_seeds_and_settings_over_those_of_the_file(tmp_path: Path, cycle: Dataset) -> None:
    runs = plan(tmp_path, GRID, cycle, seeds=[7], over={"training": {"batch_size": 3}})
    assert {run.settings["training.seed"] for run in runs} == {7}
    # What was a difference is none now: each run is planned once.
    assert [run.settings["training.batch_size"] for run in runs] == [3, 3, 3, 3]


LAYERS = """
[base]
model.dropout = 0.3
loss.centres = "mix"
loss.n_negatives = 9
[datasets.cycle]
model.dropout = 0.6
loss.centres = "states"
[[grid]]
loss.name = ["sce", "ce", "ce-"]
"""


def test_a_dataset_has_its_own_and_losses_take_what_they_know(
    tmp_path: Path, cycle: Dataset
) -> None:
    other = replace(cycle, name="other")
    of_other = {run.settings["loss.name"]: run.settings for run in plan(tmp_path, LAYERS, other)}
    of_cycle = {run.settings["loss.name"]: run.settings for run in plan(tmp_path, LAYERS, cycle)}
    for found, expected in ((of_other, (0.3, "mix")), (of_cycle, (0.6, "states"))):
        assert (found["sce"]["model.dropout"], found["sce"]["loss.centres"]) == expected
    assert "loss.centres" not in of_cycle["ce"]
    assert of_cycle["ce-"]["loss.n_negatives"] == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss.name = 'ce'\nloss.centres = 'mix'", r"on cycle: .*centres"),
        ("training.epochs = 0", r"epochs must be from 1"),
    ],
)
def test_what_no_run_can_have_is_refused_before_the_first(
    tmp_path: Path, cycle: Dataset, text: str, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        plan(tmp_path, f"[[grid]]\nloss.name = 'sce'\n[[grid]]\n{text}", cycle)
    assert "mine: [[grid]] 2" in str(caught.value)


def test_buckets_larger_than_the_catalogue_are_left_out(tmp_path: Path, cycle: Dataset) -> None:
    text = "[[grid]]\nloss.bucket_size_y = [40, 41, '100%  of items', '0.1 % of items']"
    made = make_plan(sweep(tmp_path, text), [cycle], seeds=[0, 1])
    assert [run.settings["loss.bucket_size_y"] for run in made.runs] == [40, 1, 40, 1]
    assert made.notes == ("bucket_size_y 41 is more than the items of cycle",)


def test_the_variant_is_not_of_data_and_seeds(tmp_path: Path, cycle: Dataset) -> None:
    other = Dataset.of("other", make_cycle(tmp_path / "other", items=41))
    wanted = sweep(tmp_path, GRID)
    variant = make_plan(wanted, [cycle]).variant
    assert make_plan(wanted, [other], seeds=[5]).variant == variant


@pytest.mark.parametrize(
    ("text", "over", "same"),
    [
        (GRID, {"training": {"epochs": 100}}, True),  # what it is anyway
        (GRID + "[base]\nloss.beta = 1\n", None, True),
        (GRID.replace("50% of", "50.0 %  of"), None, True),
        (GRID.replace("[4,", "[4, 4,"), None, True),
        (GRID + "[datasets.made]\nsynthetic = { items = 300, users = 9 }", None, True),
        (GRID + "[datasets.made]\nmodel.dim = 64", None, True),
        (GRID + "[[grid]]\nloss.name = 'gbce'\nloss.n_negatives = 3\nloss.t = 0.75", None, True),
        (GRID, {"training": {"epochs": 2}}, False),
        ("", None, False),
        (GRID.replace("50% of", "49% of"), None, False),
        (GRID.replace('"50% of items"', "20"), None, False),  # on 40 items the same, elsewhere not
        (GRID + "[datasets.made]\nmodel.dim = 32", None, False),
        (GRID + "[datasets.made]\nloss.alpha = -1", None, False),  # cannot be, and is not run on
        ("measure = 'steps'\n" + GRID, None, False),
    ],
)
def test_the_variant_is_of_what_makes_other_runs_and_not_of_the_spelling(
    tmp_path: Path, cycle: Dataset, text: str, over: Any, same: bool
) -> None:
    variant = make_plan(sweep(tmp_path, GRID), [cycle]).variant
    assert (make_plan(sweep(tmp_path, text), [cycle], over=over).variant == variant) == same


@pytest.mark.parametrize(
    ("before", "over", "batch"),
    [
        ("", {}, 32),
        ("[base]\ntraining.batch_size = 12", {}, 3),
        ("[base]\ntraining.batch_size = 12\n[datasets.cycle]\ntraining.batch_size = 1", {}, 1),
        ("[base]\ntraining.batch_size = 12", {"training": {"batch_size": 16}}, 4),
    ],
)
def test_a_share_of_the_batch_is_of_the_one_there_would_be(
    tmp_path: Path, cycle: Dataset, before: str, over: Any, batch: int
) -> None:
    text = before + "\n[[grid]]\ntraining.batch_size = '25% of batch'"
    (run,) = make_plan(sweep(tmp_path, text), [cycle], seeds=[0], over=over).runs
    assert run.settings["training.batch_size"] == batch


def test_what_is_set_is_for_the_losses_that_have_it(tmp_path: Path, cycle: Dataset) -> None:
    wanted = sweep(tmp_path, "[[grid]]\nloss.name = ['sce', 'ce']")
    runs = make_plan(wanted, [cycle], seeds=[0], over={"loss": {"alpha": 3.0}}).runs
    assert [run.settings.get("loss.alpha") for run in runs] == [3.0, None]
    with pytest.raises(InputError, match=r"--set loss.t: no loss of mine has it"):
        make_plan(wanted, [cycle], over={"loss": {"t": 0.5}})


def test_settings_for_a_dataset_that_is_not_there_are_mentioned(
    tmp_path: Path, cycle: Dataset
) -> None:
    made = make_plan(sweep(tmp_path, "[datasets.cyle]\nmodel.dim = 3"), [cycle])
    assert made.notes == (
        "the settings of [datasets.cyle], as no dataset of this sweep is called so",
    )


def test_nothing_to_run_is_said(tmp_path: Path, cycle: Dataset) -> None:
    with pytest.raises(InputError, match="nothing to run: bucket_size_y 41 is more than"):
        plan(tmp_path, "[[grid]]\nloss.bucket_size_y = 41", cycle)
    with pytest.raises(InputError, match="each once; got"):
        plan(tmp_path, GRID, cycle, seeds=[])


def test_every_setting_makes_another_run(tmp_path: Path, cycle: Dataset) -> None:
    changes = ("", "model.dim = 32", "training.epochs = 1", "loss.alpha = 3", "model.sink = false")
    runs = [plan(tmp_path, f"[[grid]]\n{text}", cycle)[0] for text in changes]
    assert len({run.key for run in runs}) == len(changes)
    said = plan(tmp_path, "[base]\ntraining.epochs = 100", cycle)[0]  # what it is anyway
    assert said.key == runs[0].key


def test_the_key_is_of_content_and_not_of_names(tmp_path: Path, cycle: Dataset) -> None:
    moved = Dataset.of("moved", make_cycle(tmp_path / "elsewhere", items=40))
    larger = Dataset.of("cycle", make_cycle(tmp_path / "larger", items=41))
    (here,), (there,), (other,) = (plan(tmp_path, "", one) for one in (cycle, moved, larger))
    assert here.key == there.key != other.key
    few = plan(tmp_path, 'measure = "steps"', cycle)[0]
    assert few.key != here.key
    assert few.steps == 40


def test_other_times_are_other_data_to_a_model_that_uses_them(
    tmp_path: Path, cycle: Dataset
) -> None:
    text = """
        [[grid]]
        model.name = "sasrec"
        [[grid]]
        model.name = "hstu"
        model.times = ["past", "none"]
    """
    first, second = (
        {
            (run.settings["model.name"], run.settings.get("model.times")): run.key
            for run in plan(tmp_path, text, replace(cycle, times_hash=times))
        }
        for times in "ab"
    )
    assert [one for one in first if first[one] != second[one]] == [("hstu", "past")]


def test_datasets_are_those_given_or_else_those_of_the_file(tmp_path: Path, cycle: Dataset) -> None:
    text = (
        "[datasets.made]\nsynthetic = { items = 300, users = 9 }\n"
        f"[datasets.there]\npath = '{cycle.path}'\n[datasets.absent]\nmodel.dim = 3\n"
    )
    wanted = sweep(tmp_path, text)
    own = open_datasets(wanted.datasets, [], tmp_path / "data")
    assert [(one.name, one.n_items) for one in own] == [("made", 300), ("there", 40)]
    given = open_datasets(wanted.datasets, [f"mine={cycle.path}"], tmp_path / "data")
    assert [one.name for one in given] == ["mine"]
    with pytest.raises(InputError, match="both called cycle"):
        open_datasets(wanted.datasets, [str(cycle.path)] * 2, tmp_path)
    twice = [f"{name}={cycle.path}" for name in "ab"]
    with pytest.raises(InputError, match="a and b are the same data"):
        open_datasets(wanted.datasets, twice, tmp_path)
    with pytest.raises(InputError, match="names no dataset"):
        open_datasets({}, [], tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "loss.name = 'ce'",
        "loss.alpha = 1.5\nloss.centres = 'states'\nmodel.dim = 8",
        "training.learning_rate = 1e-8\ntraining.compile = true\ntraining.betas = [[0.5, 0.75]]",
        "training.schedule = 'warmup-cosine'\ntraining.clip_norm = 0.1",
    ],
)
def test_settings_come_back_from_the_file_that_a_run_is_given(
    tmp_path: Path, cycle: Dataset, text: str
) -> None:
    (run,) = plan(tmp_path, f"[[grid]]\n{text}", cycle)
    found = Config.compose(check_layer(tomllib.loads(run.to_toml()), "it")).to_dict()
    for dotted, value in run.settings.items():
        section, _, name = dotted.partition(".")
        assert found[section][name] == (tuple(value) if isinstance(value, list) else value)
