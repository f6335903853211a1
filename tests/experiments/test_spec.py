from pathlib import Path

import pytest

from sce.errors import InputError
from sce.experiments.figure_spec import DEFAULT_FIGURES, FigureSpec
from sce.experiments.spec import SweepSpec, load_sweep, parse_overrides


def read(tmp_path: Path, text: str) -> SweepSpec:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return load_sweep(file)


WHOLE = """
title = "Mine"
seeds = [0, 4]
[base]
model.dim = 8
[datasets.made]
synthetic = { items = 300, users = 10 }
model.dropout = 0.6
[datasets.there]
path = "data/there"
[[grid]]
loss.name = ["sce", "ce"]
training.batch_size = 16
[[figures]]
kind = "line"
x = "loss.alpha"
by = ["loss.beta"]
"""


def test_a_whole_file(tmp_path: Path) -> None:
    found = read(tmp_path, WHOLE)
    assert (found.name, found.title, found.seeds) == ("mine", "Mine", (0, 4))
    assert (found.measure, found.steps) == ("training", 0)
    assert found.base == {"model": {"dim": 8}}
    made, there = found.datasets["made"], found.datasets["there"]
    assert made.synthetic is not None
    assert (made.synthetic.items, made.settings) == (300, {"model": {"dropout": 0.6}})
    assert (there.path, there.synthetic) == ("data/there", None)
    assert found.grids == ({"loss.name": ["sce", "ce"], "training.batch_size": [16]},)
    assert found.figures == (FigureSpec("line", x="loss.alpha", by=("loss.beta",)),)


def test_an_empty_file_is_one_run_as_ever(tmp_path: Path) -> None:
    found = read(tmp_path, "")
    assert found.grids == ({},)
    assert found.seeds == (0,)
    assert found.figures == DEFAULT_FIGURES
    assert [figure.kind for figure in read(tmp_path, 'measure = "steps"').figures] == ["components"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = [1]", "seed is unknown; the nearest valid key is seeds"),
        ("seeds = [1, 1]", "whole numbers of 0 or more, each once"),
        ("seeds = 3", "whole numbers"),
        ("seeds = [true]", "whole numbers"),
        ("steps = 3", "steps belongs to"),
        ("measure = 'speed'", "one of training, steps"),
        ("measure = 'steps'\nsteps = 0", "1 or more"),
        ("base = 3", "base is a table"),
        ("[base.loss]\nalhpa = 1", "alhpa is unknown; the nearest valid key is alpha"),
        ("[base.loss]\nalpha = 'x'", "alpha must be a number"),
        ("[datasets]\nmade = 3", "datasets.made is a table"),
        ("[datasets.made]\nitems = 3", "items is unknown"),
        ("[datasets.made]\nsynthetic = { item = 300 }", "the nearest valid key is items"),
        ("[datasets.made]\nsynthetic = { items = 300 }", "made] synthetic needs users"),
        ("[datasets.made]\nsynthetic = { items = 3, users = 9 }", "two clusters"),
        ("[datasets.made]\npath = 'x'\nsynthetic = {}", "leave one out"),
        ("[datasets.made]\nmodel.dropot = 3", "the nearest valid key is dropout"),
        ("[grid]\nx = 1", "grid is a list of tables"),
        ("[[grid]]\nlos.name = 'ce'", "los is unknown; the nearest valid key is [loss]"),
        ("[[grid]]\nloss.nmae = 'ce'", "nmae is unknown; the nearest valid key is name in [loss]"),
        ("[[grid]]\nloss.name = []", "is an empty list"),
        ("[[figures]]\nkind = 'pie'", "kind: pie is unknown"),
        ("[[figures]]\ntitle = 'pie'", "needs a kind"),
        ("[[figures]]\nkind = 'line'", "needs x"),
        ("[[figures]]\nkind = 'pareto'\nx = 'space'", "valid key"),
        ("[[figures]]\nkind = 'epochs'\ny = 'luck'", "valid keys are loss, "),
        ("[[figures]]\nkind = 'table'\nby = 'loss'", "by must be a list"),
        ("[[figures]]\nkind = 'table'\ncolour = 'red'", "colour is unknown"),
        ("[[figures]]\nkind = 'table'\nlog = 'z'", "log: z is unknown; valid keys are x, y"),
        ("[[figures]]\nkind = 'line'\nx = 'loss.alhpa'", "the nearest valid key is loss.alpha"),
        ("[[figures]]\nkind = 'pareto'\ny = 'test.ndgc@10'", "valid key is test.ndcg@10"),
        ("[[figures]]\nkind = 'line'\nx = 'items'\ny = 'memroy'", "valid key is memory"),
        ("[[figures]]\nkind = 'table'\nmetrics = ['ndcg10']", "nearest valid key is ndcg@10"),
        ("[[figures]]\nkind = 'table'\nmetrics = [3]", "metrics: 3 is unknown"),
        ("[[figures]]\nkind = 'table'\nmetrics = ['ndcg@7']", "metrics: ndcg@7 is unknown"),
        ("[[figures]]\nkind = 'table'\nby = ['loss.centers']", "nearest valid key is loss.centres"),
        ("[[figures]]\nkind = 'table'\nlosses = ['scee']", "nearest valid key is sce"),
        ("[[figures]]\nkind = 'table'\npublished = [{ 'ndgc@10' = 1 }]", "valid key is ndcg@10"),
        ("[[figures]]\nkind = 'table'\npublished = [{ 'hr@10' = '1' }]", "must be a number"),
        ("[[figures]]\nkind = 'table'\npublished = [{ name = 1 }]", "must be a text"),
        ("[base]\ntraining.seed = 3", "leave out training.seed; seeds = [0, 1] or --seeds"),
        ("[datasets.a]\ntraining.seed = 3", "leave out training.seed"),
        ("[[grid]]\ntraining.seed = [1, 2]", "leave out training.seed"),
        ("[[grid]]\nloss.name = 'cee'", "[[grid]] 1: [loss] name must be one of"),
        ("[[grid]]\ntraining.epochs = ['many']", "epochs must be a whole number"),
        ("[[grid]]\ntraining.betas = [0.9, 0.98]", "betas must be 2 numbers; got 0.9"),
        ("[[grid]]\nloss.bucket_size_y = ['1.2.3% of items']", "like '50% of items'; got '1.2.3"),
        ("[[grid]]\nloss.bucket_size_y = ['50 percent']", "like '50% of items'"),
        ("[[grid]]\nloss.bucket_size_y = ['101% of items']", "above 0 and up to 100"),
        ("[[grid]]\nloss.bucket_size_y = ['50% of batch']", "like '50% of items'"),
        ("[[grid]]\ntraining.batch_size = ['50% of items']", "like '50% of batch'"),
        ("grid = []", "grid is empty"),
        ("[[grid]\n", "not valid TOML"),
        ("x = " + 3000 * "[" + 3000 * "]", "not valid TOML"),
        ("x = " + 5000 * "9", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert "mine.toml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(InputError, match=r"cannot read .*(No such file|directory)"):
            load_sweep(path)


def test_settings_over_all_others() -> None:
    found = parse_overrides(["training.epochs=2", "loss.name=ce-", "training.betas=[0.8, 0.9]"])
    assert found == {"training": {"epochs": 2, "betas": (0.8, 0.9)}, "loss": {"name": "ce-"}}


@pytest.mark.parametrize("given", ["epochs=2", "training.epochs", "training.epoch=2", "a.b=1",
                                   "training.seed=3"])  # fmt: skip
def test_settings_that_are_none(given: str) -> None:
    with pytest.raises(InputError, match="--set"):
        parse_overrides([given])
