"""Interrupted anywhere and resumed, training gives what it gives unbroken, to the bit."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sce.data.prepared import PreparedDataset
from sce.errors import InputError
from sce.evaluation.evaluate import Metrics, evaluate
from sce.losses import LOSSES, ScalableCrossEntropy
from sce.models.base import ConfiguredBackbone
from sce.models.bert4rec import BERT4Rec
from sce.models.hstu import HSTU
from sce.models.sasrec import SASRec
from sce.planning import summarize_data
from sce.training import checkpoint, trainer
from sce.training.checkpoint import Checkpointer, Trained, write_tensors
from sce.training.fit import FitResult, fit
from sce.training.run import Run
from sce.training.signals import TrainingInterrupted
from sce.training.slices import SlicedStep
from sce.training.step import TrainingStep
from tests import cycle_data
from tests.cycle_data import make_cycle
from tests.training.outcomes import outcome, read_state, stop_at

STEPS = 3  # in an epoch


class Hooked(ScalableCrossEntropy):
    """Does something at a step, counted from 1 over this process."""

    def __init__(self, at: int = 0, action: Callable[[], None] = lambda: None) -> None:
        super().__init__(n_buckets=4, coverage=False, bucket_size_x=5, bucket_size_y=6)
        self._left, self._action = [at], action  # no plain value, which would be a setting

    def with_statistics(self, *arguments: Any, **options: Any) -> Any:
        # Of every step: an epoch has few.
        self._left[0] -= 1
        if self._left[0] == 0:
            self._action()
        return super().with_statistics(*arguments, **options)


def train(
    dataset: PreparedDataset,
    out: Path,
    loss: Hooked | None = None,
    *,
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
    **changes: Any,
) -> FitResult:
    # Dropout, random buckets and an order: everything random that there is.
    model = SASRec(dataset.n_items, dim=8, blocks=1, dropout=0.3, max_length=6)
    found: FitResult = cycle_data.train(
        dataset, loss or Hooked(), model=model, out=out, resume=True, on_epoch=on_epoch, **changes
    )
    return found


@pytest.fixture(scope="module")
def unbroken(dataset: PreparedDataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    train(dataset, out)
    return outcome(out)


def test_the_same_again_is_the_same(
    dataset: PreparedDataset, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    train(dataset, tmp_path / "run")
    assert outcome(tmp_path / "run") == unbroken


def test_more_epochs_later(
    dataset: PreparedDataset, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    train(dataset, tmp_path / "run", epochs=1)
    assert len(Run.open(tmp_path / "run").metrics()) == 1
    train(dataset, tmp_path / "run", epochs=2)
    assert outcome(tmp_path / "run") == unbroken
    assert Run.open(tmp_path / "run").config["training"]["epochs"] == 2


def test_a_run_that_goes_on_has_no_result_until_it_ends_again(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    train(dataset, tmp_path / "run", epochs=1)
    assert Run.open(tmp_path / "run").result() is not None
    with pytest.raises(TrainingInterrupted):
        train(dataset, tmp_path / "run", epochs=3, on_epoch=stop_at(2))
    assert Run.open(tmp_path / "run").result() is None


@pytest.mark.parametrize("step", range(1, 2 * STEPS + 1))
def test_a_signal_at_any_step_saves_and_resuming_is_exact(
    step: int, dataset: PreparedDataset, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    number = signal.SIGTERM if step % 2 else signal.SIGINT
    handler = signal.getsignal(number)
    with pytest.raises(TrainingInterrupted, match="everything is saved") as caught:
        train(dataset, tmp_path / "run", Hooked(step, lambda: os.kill(os.getpid(), number)))
    assert caught.value.exit_code == 128 + number
    assert signal.getsignal(number) == handler
    assert not (tmp_path / "run" / "result.json").exists()
    train(dataset, tmp_path / "run")
    assert outcome(tmp_path / "run") == unbroken


@pytest.mark.parametrize(
    ("split", "message"),
    [("validation", r"epoch 1 after step 3 of 3"), ("test", "training has ended")],
)
def test_a_signal_during_evaluation(
    split: str,
    message: str,
    dataset: PreparedDataset,
    unbroken: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        if options["split"] == split:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*arguments, **options)

    monkeypatch.setattr(trainer, "evaluate", interrupted)
    with pytest.raises(TrainingInterrupted, match=message):
        train(dataset, tmp_path / "run")
    monkeypatch.undo()
    train(dataset, tmp_path / "run")
    assert outcome(tmp_path / "run") == unbroken


def test_signals_while_saving_lose_nothing(
    dataset: PreparedDataset,
    unbroken: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    def interrupted(*arguments: Any, **options: Any) -> None:
        twice()
        write_tensors(*arguments, **options)
        twice()

    hooked = Hooked(2, lambda: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(checkpoint, "write_tensors", interrupted)
    with pytest.raises(TrainingInterrupted, match="epoch 1 after step 2 of 3"):
        train(dataset, tmp_path / "run", hooked)
    monkeypatch.undo()
    train(dataset, tmp_path / "run", Hooked(STEPS + 2, lambda: pytest.fail("steps again")))
    assert outcome(tmp_path / "run") == unbroken


def test_a_second_signal_does_not_wait(dataset: PreparedDataset, tmp_path: Path) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        train(dataset, tmp_path / "run", Hooked(2, twice))
    assert not isinstance(caught.value, TrainingInterrupted)


class Crash(BaseException):
    """As if the power failed."""


def test_a_crash_at_any_write_and_resuming_is_exact(
    dataset: PreparedDataset,
    unbroken: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = 0

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        # Once before the call, once after it.
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Crash
            result = original(*arguments, **options)
            left -= 1
            if left == 0:
                raise Crash
            return result

        return call

    monkeypatch.setattr(checkpoint, "_SHARE", 0)  # save after every epoch
    monkeypatch.setattr(Path, "replace", failing(Path.replace))
    monkeypatch.setattr(checkpoint, "write_tensors", failing(write_tensors))
    crashes = 0
    while True:
        out = tmp_path / f"run{crashes}"
        left = crashes + 1
        try:
            train(dataset, out)
        except Crash:
            crashes += 1
            left = 0
            train(dataset, out)
            assert outcome(out) == unbroken, f"crash {crashes}"
        else:
            break
    assert crashes == 26  # two for each of thirteen calls
    assert sorted(file.name for file in out.iterdir()) == [
        "best.safetensors",
        "items_values.npy",
        "metrics.jsonl",
        "popularity.npy",
        "result.json",
        "resume.safetensors",
        "run.json",
        "test_ranks.npy",
        "validation_ranks.npy",
    ]


def test_records_ahead_of_the_state_are_taken_back(
    dataset: PreparedDataset, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    train(dataset, tmp_path / "run", epochs=1)
    Run.open(tmp_path / "run").add_metrics({"epoch": 2, "loss": 99})
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "lo')
    assert len(Run.open(tmp_path / "run").metrics()) == 2  # the torn line is not one
    train(dataset, tmp_path / "run")
    assert outcome(tmp_path / "run") == unbroken


# Model, loss, and settings.
KINDS: dict[str, tuple[type[ConfiguredBackbone], str, dict[str, Any]]] = {
    **{name: (SASRec, name, {}) for name in ("ce", "sce", "ce-", "gbce")},
    "row-wise": (
        SASRec,
        "sce",
        {"row_wise": True, "catalogue_learning_rate": 0.1, "schedule": "warmup-cosine"},
    ),
    "hstu": (HSTU, "ce", {"validation_users": 9}),
    "bert4rec": (BERT4Rec, "ce", {}),
    "bert4rec in shards": (
        BERT4Rec,
        "sce",
        {"batch_size": 8, "accumulate": 2, "shard_catalogue": True},
    ),
}


@pytest.mark.filterwarnings("ignore::sce.errors.TrainingWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_within_an_epoch_loses_the_steps_since_the_last_save_alone(
    kind: str, dataset: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, name, changes = KINDS[kind]
    data = summarize_data(dataset.train, dataset.n_items, batch_size=16, max_length=6)

    def go(place: str, **more: Any) -> None:
        model = backbone(dataset.n_items, dim=8, blocks=1, dropout=0.3, max_length=6)
        loss = LOSSES[name].settings().build(data)
        given: Any = {"epochs": 3, "save_minutes": 0.0, "resume": True, **changes, **more}
        cycle_data.train(dataset, loss, model=model, out=tmp_path / place, **given)

    go("unbroken")
    monkeypatch.setattr(checkpoint, "_SHARE", 0)
    left = STEPS + 3

    def crashing(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Crash
            return call(*given, **options)

        return step

    for step in (TrainingStep, SlicedStep):
        monkeypatch.setattr(step, "__call__", crashing(step.__call__))
    with pytest.raises(Crash):
        go("run")
    progress = read_state(Run.open(tmp_path / "run").resume_state)[1]["progress"]
    assert (len(progress["history"]), progress["current"]["step"]) == (1, 2)
    monkeypatch.undo()
    with pytest.raises(TrainingInterrupted):
        go("run", on_epoch=stop_at(2))
    go("run")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "unbroken")


def test_saves_are_so_many_minutes_apart_and_take_a_twentieth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    keeper = Checkpointer(Trained(nn.Linear(1, 1), None, torch.optim.SGD([torch.ones(1)])), None)
    assert not keeper.due()  # there is no file
    keeper.state_file = tmp_path / "state"
    now = 299.0
    assert keeper.due()
    assert not keeper.due(300)
    now = 300.0
    assert keeper.due(300)
    keeper._seconds = 30.0
    assert not keeper.due(300)
    now = 600.0
    assert keeper.due(300)


def test_steps_can_be_limited(dataset: PreparedDataset, tmp_path: Path) -> None:
    result = train(dataset, tmp_path / "run", epochs=9, max_steps=STEPS + 1)
    assert (result.epochs, result.stopped) == (2, "max_steps")
    assert [record["steps"] for record in result.history] == [STEPS, 1]
    assert result.history[-1]["validation"] is not None
    again = train(
        dataset,
        tmp_path / "run",
        Hooked(1, lambda: pytest.fail("a step was made")),
        epochs=9,
        max_steps=STEPS + 1,
    )
    assert again.test == result.test
    with pytest.raises(InputError, match=r"training.max_steps was 4 and is now 5"):
        train(dataset, tmp_path / "run", epochs=9, max_steps=5)
    # The steps that were made are those of an unlimited run.
    whole = train(dataset, tmp_path / "whole", epochs=1)
    assert whole.history[0]["loss"] == result.history[0]["loss"]


def test_resuming_a_finished_run_changes_nothing(
    dataset: PreparedDataset, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    first = train(dataset, tmp_path / "run")
    again = train(dataset, tmp_path / "run", Hooked(1, lambda: pytest.fail("a step was made")))
    assert again.test == first.test
    assert outcome(tmp_path / "run") == unbroken


def test_no_more_epochs_than_are_done(
    dataset: PreparedDataset, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    # Of nine epochs two are done, and the third has been begun or has not.
    for step in (2 * STEPS, 2 * STEPS + 1):
        out = tmp_path / f"run{step}"
        interrupt = Hooked(step, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(TrainingInterrupted):
            train(dataset, out, interrupt, epochs=9)
        result = train(dataset, out, Hooked(1, lambda: pytest.fail("a step was made")))
        assert (result.epochs, result.stopped) == (2, "epochs")
        found = outcome(out)
        assert found["result"] == unbroken["result"]
        assert found["best"] == unbroken["best"]
        assert found["epochs"] == unbroken["epochs"]


def test_no_more_epochs_than_are_done_and_none_was_evaluated(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    with pytest.raises(TrainingInterrupted):
        train(dataset, tmp_path / "run", epochs=9, evaluate_every=9, on_epoch=stop_at(2))
    with pytest.raises(InputError, match=r"no epoch of .* was evaluated; ask for more"):
        train(dataset, tmp_path / "run", evaluate_every=9)


def test_more_epochs_later_keep_the_evaluation_that_was_last(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    def evaluated(out: Path) -> list[int]:
        return [r["epoch"] for r in Run.open(out).metrics() if r["validation"] is not None]

    train(dataset, tmp_path / "unbroken", epochs=5, evaluate_every=2)
    assert evaluated(tmp_path / "unbroken") == [2, 4, 5]
    train(dataset, tmp_path / "run", epochs=3, evaluate_every=2)
    train(dataset, tmp_path / "run", epochs=5, evaluate_every=2)
    assert evaluated(tmp_path / "run") == [2, 3, 4, 5]  # as the setting says


def test_early_stopping_counts_across_an_interruption(
    dataset: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def constant(*_: Any, **__: Any) -> Metrics:
        return Metrics({"ndcg@10": 0.5}, users=1, seen_targets=0)

    monkeypatch.setattr(trainer, "evaluate", constant)
    interrupt = Hooked(2 * STEPS + 1, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(TrainingInterrupted):
        train(dataset, tmp_path / "run", interrupt, epochs=9, patience=3)
    result = train(dataset, tmp_path / "run", epochs=9, patience=3)
    assert (result.epochs, result.best_epoch, result.stopped) == (4, 1, "patience")


# --- what cannot be resumed


def test_other_settings_are_refused_by_name(dataset: PreparedDataset, tmp_path: Path) -> None:
    train(dataset, tmp_path / "run", epochs=1)
    with pytest.raises(InputError) as caught:
        train(dataset, tmp_path / "run", epochs=2, seed=7, learning_rate=0.5)
    message = str(caught.value)
    assert "training.learning_rate was 0.01 and is now 0.5" in message
    assert "training.seed was 0 and is now 7" in message
    assert "epochs" not in message


def test_with_a_schedule_the_epochs_are_part_of_it(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    train(dataset, tmp_path / "run", epochs=1, schedule="warmup-cosine")
    with pytest.raises(InputError, match=r"training.epochs was 1 and is now 2"):
        train(dataset, tmp_path / "run", epochs=2, schedule="warmup-cosine")


def test_fewer_epochs_than_there_are(dataset: PreparedDataset, tmp_path: Path) -> None:
    train(dataset, tmp_path / "run", epochs=2)
    with pytest.raises(InputError, match="has 2 epochs, and 1 are asked for"):
        train(dataset, tmp_path / "run", epochs=1)


@pytest.mark.filterwarnings("error")
def test_another_dataset_is_refused_before_any_warning(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    train(dataset, tmp_path / "run", epochs=1)
    other = make_cycle(tmp_path / "other", train=20, single=3)  # which would be warned of
    with pytest.raises(InputError, match="is not the dataset that") as caught:
        train(other, tmp_path / "run", epochs=1)
    assert dataset.content_hash[:12] in str(caught.value)
    assert other.content_hash[:12] in str(caught.value)


def test_nothing_to_resume_is_said(
    dataset: PreparedDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, model = tmp_path / "run", SASRec(dataset.n_items, dim=8, blocks=1)
    chosen = cycle_data.settings(epochs=1)
    line = f"sce: nothing to resume in {out}: starting\n"
    fit(model, Hooked(), dataset, settings=chosen, out=out, resume=True)
    assert capsys.readouterr().err.startswith(line)
    fit(model, Hooked(), dataset, settings=chosen, out=out, resume=True)
    assert line not in capsys.readouterr().err


def test_a_state_that_is_damaged(dataset: PreparedDataset, tmp_path: Path) -> None:
    train(dataset, tmp_path / "run", epochs=1)
    state = tmp_path / "run" / "resume.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"resume.safetensors is half-written or altered"):
        train(dataset, tmp_path / "run", epochs=2)
    with torch.random.fork_rng():
        checkpoint.write_tensors(state, {"model.x": torch.zeros(1)}, {})
    with pytest.raises(InputError, match="no checkpoint that this sce can read"):
        train(dataset, tmp_path / "run", epochs=2)
