from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.config import SECTIONS, Config, for_loss, load_toml, nearest, setting_names, setting_types
from sce.errors import InputError
from sce.losses import ScalableCrossEntropy
from tests.cycle_data import make_cycle


def read(tmp_path: Path, text: str) -> dict[str, dict[str, Any]]:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    return load_toml(file)


def test_what_is_given_is_read_and_nothing_else(tmp_path: Path) -> None:
    text = """
    [model]
    dim = 128
    [loss]
    name = "gbce"
    t = 1
    [training]
    betas = [0.9, 0.999]
    compile = true
    clip_norm = 2
    """
    given = read(tmp_path, text)
    assert given == {
        "model": {"dim": 128},
        "loss": {"name": "gbce", "t": 1.0},
        "training": {"betas": (0.9, 0.999), "compile": True, "clip_norm": 2.0},
    }
    assert isinstance(given["training"]["clip_norm"], float)


def test_later_layers_win_and_the_rest_is_default() -> None:
    config = Config.compose(
        {"model": {"dim": 128, "heads": 2}, "training": {"epochs": 5}},
        {"model": {"dim": 32}, "loss": {}},
    )
    model = config.to_dict()["model"]
    assert (model["dim"], model["heads"], config.training.epochs) == (32, 2, 5)
    assert config.training.learning_rate == 1e-3
    assert (config.model_name, config.loss_name) == ("sasrec", "sce")


@pytest.mark.parametrize(
    ("options", "dropped"),
    [
        ({}, []),
        ({"name": "sce"}, []),
        ({"name": "gbce"}, ["bucket_size_y", "centres"]),
    ],
)
def test_another_loss_leaves_out_what_is_not_its_own(
    options: dict[str, Any], dropped: list[str]
) -> None:
    own: dict[str, Any] = {"bucket_size_y": 6, "centres": "mix"}
    for file in ({"loss": own, "model": {"dim": 8}}, {"loss": {"name": "sce", **own}}):
        kept, left_out = for_loss(file, {"loss": options})
        assert left_out == dropped
        assert kept.get("model") == file.get("model")
        config = Config.compose(kept, {"loss": options}).to_dict()
        assert config["loss"]["name"] == options.get("name", "sce")
        assert config["loss"].get("bucket_size_y") == (None if dropped else 6)
    shared, left_out = for_loss(
        {"loss": {"name": "gbce", "n_negatives": 9, "t": 0.5}}, {"loss": {"name": "ce-"}}
    )
    assert (shared["loss"], left_out) == ({"name": "gbce", "n_negatives": 9}, ["t"])


def test_a_config_comes_back_from_its_dictionary() -> None:
    for loss in (
        {"name": "ce-"},
        {"n_buckets": 3, "coverage": False, "bucket_size_x": 4},
        {"alpha": 3.0},
    ):
        config = Config.compose({"loss": loss})
        assert Config.compose(config.to_dict()) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[loss]\nbucket_sizey = 5", r"\[loss\] bucket_sizey is unknown; .* bucket_size_y"),
        ("[training]\nlearningrate = 1", r"\[training\] learningrate .* is learning_rate in"),
        ("[trainign]\nepochs = 1", r"trainign is unknown; the nearest valid key is \[training\]"),
        ("[model]\nzzz = 1", r"valid keys are name, dim, blocks, dropout, max_length, heads"),
        ("epochs = 3", r"epochs is unknown; the nearest valid key is epochs in \[training\]"),
        ("[model]\nepochs = 3", r"\[model\] epochs is unknown; .* epochs in \[training\]"),
        ("[training]\ndim = 3", r"\[training\] dim is unknown; .* dim in \[model\]"),
        ("learn_rate = 3", r"learn_rate .* nearest valid key is learning_rate in \[training\]"),
        ("[model]\nbatchsize = 3", r"nearest valid key is batch_size in \[training\]"),
        ("[loss]\nbucket_size = 3", r"\[loss\] bucket_size is unknown; .* key is bucket_size_"),
        ("zzz = 3", r": zzz is unknown; valid keys are model, loss, training"),
        ("training = 3", r"training is a table of settings; write \[training\]"),
        ('[training]\nepochs = "ten"', r"\[training\] epochs must be a whole number.*; got 'ten'"),
        ("[training]\nepochs = 1.5", r"a whole number.*; got 1.5"),
        ("[training]\nepochs = 2.0", r"a whole number.*; got 2.0"),
        ("[training]\nepochs = '3'", r"a whole number.*; got '3'"),
        ("[training]\nepochs = [3]", r"a whole number.*; got \[3\]"),
        ("[training]\nepochs = []", r"a whole number.*; got \[\]"),
        ("[training]\nepochs = true", r"a whole number.*; got True"),
        ("[training]\ncompile = 1", r"compile must be True or False; got 1"),
        ("[training]\nlearning_rate = false", r"learning_rate must be a number; got False"),
        ("[training]\nbetas = [0.9]", r"betas must be 2 numbers; got \[0.9\]"),
        ("[training]\ndevice = 0", r"device must be text; got 0"),
        ('[loss]\nname = "softmax"', r"name must be one of bce, .*; got 'softmax'"),
        ("[loss]\nt = 'x'", r"\[loss\] t must be a number"),
        ("[loss\n", r"is not valid TOML"),
        ("x = " + 3000 * "[" + 3000 * "]", r"is not valid TOML"),
        ("x = " + 5000 * "9", r"is not valid TOML"),
        ("#" * (2**20 + 1), r"it is longer than 1.00 MiB"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path, text)
    assert "settings.toml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*: No such file"):
        load_toml(tmp_path / "none.toml")
    with pytest.raises(InputError, match=r"cannot read .*: Is a directory"):
        load_toml(tmp_path)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_key_with_one_letter_wrong_names_the_right_one(data: st.DataObject) -> None:
    section = data.draw(st.sampled_from(sorted(SECTIONS)))
    known = setting_types(section)
    name = data.draw(st.sampled_from([name for name in known if len(name) > 5]))
    place = data.draw(st.integers(1, len(name) - 2))
    assert name in nearest(name[:place] + name[place + 1 :], known)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"loss": {"name": "ce", "t": 0.5}}, "loss.t belongs to gbce, and the loss is ce"),
        ({"loss": {"n_negatives": 5}}, r"n_negatives belongs to bce\+, gbce, ce-.* is sce"),
        ({"loss": {"name": "gbce", "t": 2.0}}, r"loss: t must lie in \[0, 1\], got 2.0"),
        ({"loss": {"size": 2}}, "loss: .*'size'"),
        ({"model": {"dim": 0}}, "model: dim must be at least 1; got 0"),
        ({"training": {"epochs": 0}}, "^training: epochs must be from 1 to .*; got 0"),
        ({"training": {"row_wise": True}, "loss": {"name": "ce"}}, "row_wise .* the loss is ce$"),
    ],
)
def test_settings_that_contradict_their_class(layer: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Config.compose(layer)


def test_every_setting_has_a_dotted_name() -> None:
    names = setting_names()
    assert {"model.name", "loss.name", "model.dim", "loss.t", "training.epochs"} <= names
    config = Config.compose().to_dict()
    assert {f"{section}.{name}" for section in config for name in config[section]} <= names


def test_a_model_beyond_all_memory(tmp_path: Path) -> None:
    dataset = make_cycle(tmp_path / "data")
    with pytest.raises(InputError, match="12 items in 100,000,000 dimensions does not fit"):
        Config.compose({"model": {"dim": 10**8}}).build(dataset)


def test_model_and_loss_are_built_for_the_dataset(tmp_path: Path) -> None:
    dataset = make_cycle(tmp_path / "data")
    training = {"batch_size": 10, "device": "cpu"}
    config = Config.compose({"model": {"dim": 8, "max_length": 4}, "training": training})
    model, loss = config.build(dataset)
    assert tuple(model.catalogue.shape) == (12, 8)
    mean = (dataset.train.lengths - 1).clip(max=4).mean()
    assert isinstance(loss, ScalableCrossEntropy)
    assert loss.n_buckets == round(2 * (10 * mean) ** 0.5)
    assert loss.coverage
    assert loss.sizes(dataset.n_items, 1)[2] == 12
    with pytest.raises(InputError, match=r"loss: alpha 1e.* buckets"):
        Config.compose({"loss": {"alpha": 1e18}}).build(dataset)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("sce", {"centres": "mix", "bucket_size_y": 5, "n_buckets": 3, "coverage": False}),
        ("ce", {"chunk_size": 5}),
        ("gbce", {"n_negatives": 3, "shared": "batch", "t": 0.5}),
    ],
)
def test_what_is_set_of_the_loss_reaches_it(
    name: str, given: dict[str, Any], tmp_path: Path
) -> None:
    _, loss = Config.compose({"loss": {"name": name, **given}}).build(make_cycle(tmp_path / "data"))
    assert {key: getattr(loss, key) for key in given} == given


def test_the_seed_is_that_of_the_first_weights(tmp_path: Path) -> None:
    dataset = make_cycle(tmp_path / "data")

    def weights(seed: int) -> list[list[float]]:
        layer = {"model": {"dim": 8}, "training": {"seed": seed}}
        found: list[list[float]] = Config.compose(layer).build(dataset)[0].catalogue.tolist()
        return found

    assert weights(1) == weights(1) != weights(2)
