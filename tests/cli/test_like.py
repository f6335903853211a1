"""Training on everything, as a measured run was trained; and what cannot be measured then."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from sce.cli import main
from sce.config import settings_like
from sce.data.prepare import prepare
from sce.errors import InputError
from sce.losses import CrossEntropy, SampledCrossEntropy, ScalableCrossEntropy
from sce.report.comparison import gather
from sce.report.record import Record
from sce.report.run_page import _headline
from sce.training.run import Run
from tests import cycle_data
from tests.cli.test_everyone import make_log
from tests.cycle_data import make_cycle
from tests.tiny_run import make_run, write_result

pytestmark = [
    pytest.mark.filterwarnings("ignore::sce.data.prepare.PrepareWarning"),
    pytest.mark.filterwarnings("ignore::sce.errors.TrainingWarning"),
]
Capture = pytest.CaptureFixture[str]


def own_loss(states: Tensor, catalogue: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy((states @ catalogue.T).transpose(1, 2), targets)


SMALL = ["--model.dim", "8", "--model.blocks", "1", "--model.max-length", "6", "--device", "cpu"]


def test_the_end_by_max_steps_is_said(tmp_path: Path, capsys: Capture) -> None:
    make_log(tmp_path / "log.csv")
    data = prepare(tmp_path / "log.csv", tmp_path / "data", split="none")
    train = ["train", str(data.path), "--out", str(tmp_path / "run"), *SMALL, "--epochs", "9"]
    assert main([*train, "--training.max-steps", "1"]) == 0
    shown = capsys.readouterr()
    assert "epoch 1 of 1 (ended by --training.max-steps)" in shown.out
    assert "\nepoch 1/1  loss" in shown.err
    like = ["train", str(data.path), "--out", str(tmp_path / "like"), "--like"]
    like.append(str(tmp_path / "run"))
    assert main(like) == 2
    told = "the best epoch of .*, 1, was its last, which --training.max-steps 1 ended; say how long"
    assert re.search(told, capsys.readouterr().err)
    assert main([*like, "--training.max-steps", "2"]) == 0
    assert Run.open(tmp_path / "like").config["training"]["max_steps"] == 2


def test_a_best_epoch_that_was_the_last_is_said(tmp_path: Path, capsys: Capture) -> None:
    data, first = str(make_cycle(tmp_path / "data").path), str(tmp_path / "first")
    assert main(["train", data, "--out", first, *SMALL, "--epochs", "1"]) == 0
    like = ["train", data, "--like", first, "--out"]
    told = "warning: the best epoch of .*, 1, was its last: longer training may do better; say how"
    for out, more, said in (("a", [], True), ("b", ["--epochs", "2"], False)):
        capsys.readouterr()
        assert main([*like, str(tmp_path / out), *more]) == 0
        assert bool(re.search(told, capsys.readouterr().err)) is said


def test_from_a_measured_run_to_one_of_everything(tmp_path: Path, capsys: Capture) -> None:
    make_log(tmp_path / "log.csv")
    measured = prepare(tmp_path / "log.csv", tmp_path / "split")
    everything = prepare(tmp_path / "log.csv", tmp_path / "data", split="none")
    assert len(everything.train) == len(everything.user_ids) > len(measured.train)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    train = ["train", str(measured.path), "--out", first, *SMALL, "--loss", "gbce"]
    assert main([*train, "--loss.n-negatives", "7", "--epochs", "2"]) == 0
    best = json.loads((tmp_path / "first" / "result.json").read_text())["best_epoch"]

    train = ["train", str(everything.path), "--out", second]
    capsys.readouterr()
    assert main(train) == 2
    assert "say how long to train with --epochs N, or take a" in capsys.readouterr().err
    assert main([*train, "--like", first, "--config", "x.toml"]) == 2
    assert main([*train, "--like", first, "--seed", "3"]) == 0
    shown, said = capsys.readouterr()
    assert "no test users" not in said  # that is what "none" means
    assert "sce evaluate" not in shown
    assert f"kept        epoch {best} of {best} (all that were asked for)" in shown
    before, after = Run.open(first).config, Run.open(second).config
    changed = {"epochs": best, "patience": 0, "seed": 3}
    assert after == before | {"training": before["training"] | changed}
    result = Run.open(second).result()
    assert result is not None
    assert (result["epochs"], result["best_epoch"], result["test"]) == (best, best, None)

    assert main(["evaluate", second]) == 2
    assert "no test users (split none: all was trained on): there is" in capsys.readouterr().err
    assert main(["recommend", second, "--out", str(tmp_path / "found.csv")]) == 0
    assert capsys.readouterr().err == "sce: wrote 2,010 rows for 201 users\n"
    with pytest.raises(InputError, match=r"trained on everything \(split none\) and measured"):
        gather([Path(first), Path(second)])
    headline = _headline(Record.read(Run.open(second)))
    assert headline["missing"] == "Not measured"
    assert headline["notice"].startswith("All of the log was trained on (split none)")
    assert "longer training" not in headline["sentence"]


def test_what_goes_with_a_setting_goes_when_it_is_taken_back(tmp_path: Path) -> None:
    data, run = str(make_cycle(tmp_path / "data").path), str(tmp_path / "run")
    train = ["train", data, "--out", run, *SMALL, "--epochs", "3", "--loss", "sce"]
    more = ["--training.row-wise", "--training.schedule", "warmup-cosine"]
    assert main([*train, *more, "--training.warmup-steps", "2"]) == 0
    other = ["--training.no-row-wise", "--training.schedule", "constant", "--epochs", "2"]
    for option in ("--like", "--from"):
        out = tmp_path / option[2:]
        assert main(["train", data, option, run, "--out", str(out), *other]) == 0
        training = Run.open(out).config["training"]
        assert not training["row_wise"]
        assert (training["catalogue_learning_rate"], training["warmup_steps"]) == (None, None)


def test_steps_are_as_many_as_are_asked_for(tmp_path: Path) -> None:
    data, run = str(make_cycle(tmp_path / "data").path), str(tmp_path / "run")
    train = ["train", data, "--out", run, *SMALL, "--batch-size", "48", "--epochs", "9"]
    assert main([*train, "--training.max-steps", "1"]) == 0
    like = ["train", data, "--like", run, "--out", str(tmp_path / "like")]
    assert main([*like, "--training.max-steps", "3"]) == 0
    assert (Run.open(tmp_path / "like").result() or {})["epochs"] == 3


def test_runs_of_python(tmp_path: Path, capsys: Capture) -> None:
    dataset, out = make_cycle(tmp_path / "data"), str(tmp_path / "out")
    losses: dict[str, Any] = {
        "sce": ScalableCrossEntropy(),
        "own": own_loss,
        "sum": CrossEntropy(reduction="sum"),
        "ce-": SampledCrossEntropy(4),
    }
    for name, loss in losses.items():
        cycle_data.train(dataset, loss, out=tmp_path / name)
    again = ["train", str(dataset.path), "--out", out, "--epochs", "1"]
    assert main([*again, "--like", str(tmp_path / "sce"), "--loss.alpha", "3"]) == 0
    assert Run.open(out).config["loss"]["name"] == "sce"
    for name, option, told in (
        ("own", "--from", "own_loss: say with which --loss to go on"),
        ("sum", "--from", "was trained on no mean of its loss: do that in Python"),
        ("ce-", "--like", "trained in Python: loss.negatives must be one of uniform, "),
    ):
        assert main([*again, "--force", option, str(tmp_path / name)]) == 2
        assert told in capsys.readouterr().err
    assert main([*again, "--force", "--from", str(tmp_path / "own"), "--loss", "sce"]) == 0
    resume = ["train", str(dataset.path), "--out", str(tmp_path / "sce"), "--resume"]
    capsys.readouterr()
    assert main(resume) == 2
    assert "loss.reduction): resume it as it was begun, in Python or" in capsys.readouterr().err


def test_runs_that_no_other_can_be_like(tmp_path: Path) -> None:
    make_log(tmp_path / "log.csv")
    dataset = prepare(tmp_path / "log.csv", tmp_path / "data")
    run = make_run(tmp_path / "run", dataset, schedule="warmup-cosine")
    with pytest.raises(InputError, match="has not ended: its best epoch is not known yet"):
        settings_like(run.path, {})
    write_result(run)
    with pytest.raises(InputError, match="fall over 20 epochs, and the best was 3"):
        settings_like(run.path, {})
    found = settings_like(run.path, {"training": {"epochs": 9}})
    assert found["training"]["patience"] == 0
    other = make_run(tmp_path / "other", dataset, loss="mine")
    write_result(other)
    with pytest.raises(InputError, match="sasrec and mine, of which one is not of sce"):
        settings_like(other.path, {})
