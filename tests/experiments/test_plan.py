import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.config import Config, check_layer
from sce.errors import InputError
from sce.experiments.datasets import Dataset
from sce.experiments.plan import PlannedRun, flatten, make_plan, open_datasets, to_toml
from sce.experiments.settings import SweepSettings, load_sweep
from tests.cycle_data import make_cycle


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset("cycle", make_cycle(tmp_path_factory.mktemp("data") / "cycle", items=40))


def sweep(tmp_path: Path, text: str) -> SweepSettings:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return load_sweep(file)


def plan(tmp_path: Path, text: str, *datasets: Dataset, **options: Any) -> tuple[PlannedRun, ...]:
    return make_plan(sweep(tmp_path, text), datasets, **options).runs


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
    mix = left_open.settings["loss.mix"]
    said = f"[[grid]]\nloss.bucket_size_y = 40\nloss.mix = {json.dumps(mix)}\n"
    assert plan(tmp_path, said, cycle)[0].key == left_open.key


def test_runs_are_named_by_what_each_dataset_decided(tmp_path: Path, cycle: Dataset) -> None:
    large = Dataset("large", make_cycle(tmp_path / "large", items=50))
    text = "[datasets.large]\nmodel.dim = 32\n[[grid]]\nloss.name = 'sce'\nloss.mix = true"
    labels = [run.label for run in plan(tmp_path, text, cycle, large)]
    assert labels == ["cycle sce bucket_size_y=40", "large sce bucket_size_y=50"]


def test_the_product_of_each_grid_seed_by_seed(tmp_path: Path, cycle: Dataset) -> None:
    runs = plan(tmp_path, GRID, cycle)
    found = [
        (
            run.config.training.seed,
            run.config.loss.name,
            run.config.loss.bucket_size_y or run.config.loss.n_negatives,
            run.config.training.batch_size,
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
    assert {run.config.training.seed for run in runs} == {7}
    # What was a difference is none now: each run is planned once.
    assert [run.config.training.batch_size for run in runs] == [3, 3, 3, 3]


LAYERS = """
[base]
model.dropout = 0.3
loss.mix = true
loss.n_negatives = 9
[datasets.cycle]
model.dropout = 0.6
loss.mix = false
[[grid]]
loss.name = ["sce", "ce", "ce-"]
"""


def test_a_dataset_has_its_own_and_losses_take_what_they_know(
    tmp_path: Path, cycle: Dataset
) -> None:
    other = Dataset("other", cycle.prepared)
    of_other = {run.config.loss.name: run.config for run in plan(tmp_path, LAYERS, other)}
    of_cycle = {run.config.loss.name: run.config for run in plan(tmp_path, LAYERS, cycle)}
    assert (of_other["sce"].model.dropout, of_cycle["sce"].model.dropout) == (0.3, 0.6)
    assert (of_other["sce"].loss.mix, of_cycle["sce"].loss.mix) == (True, False)
    assert (of_cycle["ce"].loss.mix, of_cycle["ce-"].loss.n_negatives) == (None, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss.name = 'ce'\nloss.mix = true", r"on cycle: loss.mix belongs to sce"),
        ("loss.name = 'cee'", r"name must be one of"),
        ("training.epochs = ['many']", r"epochs must be a whole number; got 'many'"),
        ("training.betas = [0.9, 0.98]", r"betas must be a list of 2 numbers; got 0.9"),
        ("training.epochs = 0", r"epochs must be at least 1"),
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
    assert [run.config.loss.bucket_size_y for run in made.runs] == [40, 1, 40, 1]
    assert made.notes == ("bucket_size_y 41 is more than the items of cycle",)


@settings(max_examples=40, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "model": st.fixed_dictionaries({}, optional={"dim": st.sampled_from([8, 16])}),
            "loss": st.sampled_from(
                [{"name": "ce"}, {"name": "sce", "alpha": 1.5}, {"n_buckets": 3}, {"name": "gbce"}]
            ),
            "training": st.fixed_dictionaries(
                {},
                optional={
                    "clip_norm": st.floats(0.1, 10),
                    "compile": st.booleans(),
                    "learning_rate": st.floats(1e-8, 1),
                    "schedule": st.just("warmup-cosine"),
                },
            ),
        },
    )
)
def test_settings_come_back_from_the_file_that_a_run_is_given(layer: dict[str, Any]) -> None:
    config = Config.compose(layer)
    content = tomllib.loads(to_toml(config))
    assert Config.compose(check_layer(content, "it")) == config


def test_the_variant_is_that_of_the_settings_without_data_and_seeds(
    tmp_path: Path, cycle: Dataset
) -> None:
    other = Dataset("other", make_cycle(tmp_path / "other", items=41))
    wanted = sweep(tmp_path, GRID)
    variant = make_plan(wanted, [cycle]).variant
    assert make_plan(wanted, [other], seeds=[5]).variant == variant
    assert make_plan(wanted, [cycle], over={"training": {"epochs": 2}}).variant != variant
    assert make_plan(sweep(tmp_path, ""), [cycle]).variant != variant


@pytest.mark.parametrize(
    ("text", "over"),
    [
        (GRID, {"training": {"epochs": 100}}),  # what it is anyway
        (GRID + "[base]\nloss.alpha = 2\n", None),
        (GRID.replace("50% of", "50.0 %  of"), None),
        (GRID.replace("[4,", "[4, 4,"), None),
        (GRID + "[datasets.made]\nsynthetic = { items = 300, users = 9 }", None),
        (GRID + "[datasets.made]\nmodel.dim = 64", None),
        (GRID + "[[grid]]\nloss.name = 'gbce'\nloss.n_negatives = 3\nloss.t = 0.75", None),
    ],
)  # fmt: skip
def test_the_variant_is_not_of_the_spelling(
    tmp_path: Path, cycle: Dataset, text: str, over: Any
) -> None:
    variant = make_plan(sweep(tmp_path, GRID), [cycle]).variant
    assert make_plan(sweep(tmp_path, text), [cycle], over=over).variant == variant


@pytest.mark.parametrize(
    "text",
    [
        GRID.replace("50% of", "49% of"),
        GRID.replace('"50% of items"', "20"),  # on 40 items the same, elsewhere not
        GRID + "[datasets.made]\nmodel.dim = 32",
        GRID + "[datasets.made]\nloss.mix_of = -1",  # cannot be, and is not run on
        "measure = 'steps'\n" + GRID,
    ],
)
def test_the_variant_is_of_whatever_makes_other_runs(
    tmp_path: Path, cycle: Dataset, text: str
) -> None:
    variant = make_plan(sweep(tmp_path, GRID), [cycle]).variant
    assert make_plan(sweep(tmp_path, text), [cycle]).variant != variant


@pytest.mark.parametrize(
    ("before", "batch"),
    [
        ("", 32),
        ("[base]\ntraining.batch_size = 12", 3),
        ("[base]\ntraining.batch_size = 12\n[datasets.cycle]\ntraining.batch_size = 1", 1),
    ],
)
def test_a_share_of_the_batch_is_of_the_one_there_would_be(
    tmp_path: Path, cycle: Dataset, before: str, batch: int
) -> None:
    text = before + "\n[[grid]]\ntraining.batch_size = '25% of batch'"
    (run,) = make_plan(sweep(tmp_path, text), [cycle], seeds=[0]).runs
    assert run.config.training.batch_size == batch


def test_a_share_is_of_the_batch_that_is_set_over_it(tmp_path: Path, cycle: Dataset) -> None:
    text = "[[grid]]\ntraining.batch_size = [32, '50% of batch']"
    over = {"training": {"batch_size": 16}}
    runs = make_plan(sweep(tmp_path, text), [cycle], seeds=[0], over=over).runs
    assert [run.config.training.batch_size for run in runs] == [16, 8]


def test_what_is_set_is_for_the_losses_that_have_it(tmp_path: Path, cycle: Dataset) -> None:
    wanted = sweep(tmp_path, "[[grid]]\nloss.name = ['sce', 'ce']")
    runs = make_plan(wanted, [cycle], seeds=[0], over={"loss": {"noise": 2.0}}).runs
    assert [(run.config.loss.name, run.config.loss.noise) for run in runs] == [
        ("sce", 2.0),
        ("ce", None),
    ]
    with pytest.raises(InputError, match=r"--set loss.t: no loss of mine has it"):
        make_plan(wanted, [cycle], over={"loss": {"t": 0.5}})


def test_settings_for_a_dataset_that_is_not_there_are_mentioned(
    tmp_path: Path, cycle: Dataset
) -> None:
    made = make_plan(sweep(tmp_path, "[datasets.cyle]\nmodel.dim = 3"), [cycle])
    assert made.notes == (
        "the settings of [datasets.cyle], as no dataset of this sweep is called so",
    )


@pytest.mark.parametrize("seeds", [[0, 0], [-1], []])
def test_seeds_that_are_none(tmp_path: Path, cycle: Dataset, seeds: list[int]) -> None:
    with pytest.raises(InputError, match=r"each once; got|there are no seeds"):
        plan(tmp_path, GRID, cycle, seeds=seeds)


def test_nothing_to_run_is_said(tmp_path: Path, cycle: Dataset) -> None:
    with pytest.raises(InputError, match="nothing to run: bucket_size_y 41 is more than"):
        plan(tmp_path, "[[grid]]\nloss.bucket_size_y = 41", cycle)


def test_every_setting_makes_another_run(tmp_path: Path, cycle: Dataset) -> None:
    changes = ("", "model.dim = 32", "training.epochs = 1", "loss.alpha = 3", "model.sink = false")
    runs = [plan(tmp_path, f"[[grid]]\n{text}", cycle)[0] for text in changes]
    assert len({run.key for run in runs}) == len(changes)
    said = plan(tmp_path, "[base]\ntraining.epochs = 100", cycle)[0]  # what it is anyway
    assert said.key == runs[0].key


def test_the_key_is_of_content_and_not_of_names(tmp_path: Path, cycle: Dataset) -> None:
    moved = Dataset("moved", make_cycle(tmp_path / "elsewhere", items=40))
    larger = Dataset("cycle", make_cycle(tmp_path / "larger", items=41))
    (here,), (there,), (other,) = (plan(tmp_path, "", one) for one in (cycle, moved, larger))
    assert here.key == there.key != other.key
    few = plan(tmp_path, 'measure = "steps"', cycle)[0]
    assert few.key != here.key
    assert few.steps == 40


def test_settings_of_other_losses_are_not_listed() -> None:
    flat = flatten(Config.compose({"loss": {"name": "ce"}}))
    assert "loss.chunk_size" in flat
    assert "loss.mix" not in flat


def test_datasets_are_those_given_or_else_those_of_the_file(tmp_path: Path, cycle: Dataset) -> None:
    text = (
        "[datasets.made]\nsynthetic = { items = 300, users = 9 }\n"
        f"[datasets.there]\npath = '{cycle.prepared.path}'\n[datasets.absent]\nmodel.dim = 3\n"
    )
    wanted = sweep(tmp_path, text)
    own = open_datasets(wanted, [], tmp_path / "data")
    assert [(one.name, one.n_items) for one in own] == [("made", 300), ("there", 40)]
    given = open_datasets(wanted, [f"mine={cycle.prepared.path}"], tmp_path / "data")
    assert [one.name for one in given] == ["mine"]
    with pytest.raises(InputError, match="both called cycle"):
        open_datasets(wanted, [str(cycle.prepared.path)] * 2, tmp_path)
    twice = [f"{name}={cycle.prepared.path}" for name in "ab"]
    with pytest.raises(InputError, match="a and b are the same data"):
        open_datasets(wanted, twice, tmp_path)
    with pytest.raises(InputError, match="names no dataset"):
        open_datasets(sweep(tmp_path, ""), [], tmp_path)
