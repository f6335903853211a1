import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sce.data.batches import DeviceSequences, trainable_rows
from sce.data.prepared import PreparedDataset
from sce.errors import InputError
from sce.evaluation.evaluate import Metrics, evaluate
from sce.evaluation.ranking import Popularity
from sce.losses import BucketStatistics, CrossEntropy, ScalableCrossEntropy
from sce.training import trainer
from sce.training.capture import StepResult
from sce.training.checkpoint import Checkpointer, EpochSoFar, read_tensors
from sce.training.fit import FitResult, TrainingWarning, fit
from sce.training.run import Run
from sce.training.step import TrainingStep
from sce.training.trainer import CHECK_EVERY, DivergenceError, LossMonitor, Trainer, make_record
from tests.cycle_data import make_cycle, settings, small_model, train

ONE_STEP = pytest.mark.filterwarnings("ignore:there are 48 training users")


def test_an_epoch_has_every_row_once_in_an_order_of_its_seed(dataset: PreparedDataset) -> None:
    sequences = DeviceSequences.place(dataset.train)
    made: Any = SimpleNamespace(
        rows=trainable_rows(sequences),
        settings=SimpleNamespace(step_size=7),
        step=SimpleNamespace(targets=lambda rows: (sequences.lengths[rows] - 1).clamp(max=4)),
    )
    before = torch.get_rng_state()
    (first, targets), (again, _), (other, _) = (Trainer._batches(made, seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert [len(rows) for rows in first] == [7] * 6 + [6]
    assert torch.cat(list(first)).sort().values.tolist() == made.rows.tolist()
    assert [rows.tolist() for rows in first] == [rows.tolist() for rows in again]
    assert [rows.tolist() for rows in first] != [rows.tolist() for rows in other]
    assert targets == [sum(min(len(dataset.train[int(r)]) - 1, 4) for r in rows) for rows in first]


def test_the_schedule_is_as_the_settings_say(
    dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors: list[float] = []
    monkeypatch.setattr(trainer, "set_rate", lambda _, factor: factors.append(factor))
    train(dataset, epochs=2, schedule="warmup-cosine", warmup_steps=4)
    # Three steps an epoch, counted on over both.
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.5])


# --- early stopping


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let validation find these scores, one after the other."""

    def let(*values: float) -> None:
        found = iter(values)

        def scripted(model: object, data: object, *, split: str, **_: Any) -> Metrics:
            asked = split == "validation" and not isinstance(model, Popularity)
            score = next(found) if asked else 0.0
            return Metrics({"ndcg@10": score}, users=1, seen_targets=0)

        monkeypatch.setattr(trainer, "evaluate", scripted)

    return let


@ONE_STEP
@pytest.mark.parametrize(
    ("values", "patience", "trained", "best"),
    [
        ((0.5, 0.4, 0.5, 0.3), 3, 4, 1),  # the same score is no improvement
        ((0.1, 0.2, 0.1, 0.3, 0.2, 0.1), 2, 6, 4),  # an improvement starts the count anew
        ((0.3, 0.2), 1, 2, 1),
        ((0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1), 0, 7, 1),  # never
        ((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), 2, 7, 7),
    ],
)
def test_patience_is_exactly_that_many_evaluations(
    values: tuple[float, ...],
    patience: int,
    trained: int,
    best: int,
    dataset: PreparedDataset,
    scores: Callable[..., None],
) -> None:
    scores(*values)
    result = train(dataset, epochs=7, batch_size=64, patience=patience)
    assert (result.epochs, result.best_epoch) == (trained, best)
    assert result.stopped == ("epochs" if trained == 7 else "patience")
    assert [r["best"] for r in result.history][best - 1]


@ONE_STEP
@pytest.mark.parametrize(
    ("epochs", "every", "evaluated", "best"),
    [(20, 3, [3, 6, 9], 3), (5, 2, [2, 4, 5], 2)],  # the last epoch is evaluated in any case
)
def test_patience_counts_evaluations_not_epochs(
    epochs: int,
    every: int,
    evaluated: list[int],
    best: int,
    dataset: PreparedDataset,
    scores: Callable[..., None],
) -> None:
    scores(0.5, 0.4, 0.3)
    result = train(dataset, epochs=epochs, batch_size=64, patience=2, evaluate_every=every)
    assert [r["epoch"] for r in result.history if r["validation"] is not None] == evaluated
    assert (result.epochs, result.best_epoch) == (evaluated[-1], best)


def test_the_best_weights_come_back(
    dataset: PreparedDataset, scores: Callable[..., None], tmp_path: Path
) -> None:
    scores(0.1, 0.3, 0.2, 0.1)
    model = small_model(dataset)
    weights: list[dict[str, Tensor]] = []

    def remember(_: object) -> None:
        weights.append({name: value.clone() for name, value in model.state_dict().items()})

    train(dataset, model=model, epochs=4, on_epoch=remember, out=tmp_path / "run")
    assert all(torch.equal(value, weights[1][name]) for name, value in model.state_dict().items())
    assert not torch.equal(weights[1]["catalogue"], weights[3]["catalogue"])


class Scaled(CrossEntropy):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, states: Tensor, *rest: Any, **options: Any) -> Tensor:
        return super().forward(states * self.scale, *rest, **options)


def test_the_best_weights_of_the_loss_come_back_too(
    dataset: PreparedDataset, scores: Callable[..., None], tmp_path: Path
) -> None:
    scores(0.1, 0.3, 0.2, 0.3)  # the last for the ranks, when it goes on
    loss, scales = Scaled(), []
    train(
        dataset,
        loss,
        epochs=3,
        on_epoch=lambda _: scales.append(loss.scale.item()),
        out=tmp_path / "run",
    )
    assert len(set(scales)) == 3
    assert loss.scale.item() == scales[1]
    again = Scaled()
    train(dataset, again, epochs=3, out=tmp_path / "run", resume=True)
    assert again.scale.item() == scales[1]
    assert "scale" not in read_tensors(tmp_path / "run" / "best.safetensors")[0]


# --- loss that is no number


class Breaks(CrossEntropy):
    """Becomes NaN at a step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._left = [at]  # no plain value, which would be a setting

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        self._left[0] -= 1
        loss = super().forward(*arguments, **options)
        return loss * torch.nan if self._left[0] <= 0 else loss


def test_nan_stops_with_step_batch_and_hint_and_the_good_state_is_kept(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    good: list[bytes] = []

    def remember(_: object) -> None:
        good.append((out / "resume.safetensors").read_bytes())

    with pytest.raises(DivergenceError, match=r"became nan at step 2 of epoch 2") as caught:
        train(dataset, Breaks(3 + 2), out=out, on_epoch=remember)
    message = str(caught.value)
    assert "'user0" in message
    assert "and 13 more" in message
    assert "try a lower learning_rate or clip_norm=1" in message
    assert "the best epoch so far, 1, is in" in message
    assert (out / "resume.safetensors").read_bytes() == good[0]
    assert not (out / "result.json").exists()


def test_after_nan_a_lower_rate_goes_on(dataset: PreparedDataset, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(DivergenceError, match="with resume=True to go on from the last good state"):
        train(dataset, Breaks(5), out=out)

    def go_on(**changes: Any) -> FitResult:
        result: FitResult = train(dataset, Breaks(99), **changes, out=out, resume=True)
        return result

    with pytest.raises(InputError, match=r"other settings: training.seed was 0 and is now 1"):
        go_on(learning_rate=1e-3, seed=1)
    assert go_on(learning_rate=1e-3, clip_norm=1.0).epochs == 2
    manifest = json.loads((out / "run.json").read_text())
    assert manifest["config"]["training"]["learning_rate"] == 1e-3
    changed = {"training.clip_norm": None, "training.learning_rate": 1e-2}
    assert manifest["before"] == [changed]  # what the first epochs were trained with
    with pytest.raises(InputError, match=r"training.learning_rate was 0.001 and is now 0.01"):
        go_on(epochs=3, clip_norm=1.0)


def test_nan_before_anything_was_saved_promises_no_state(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    with pytest.raises(DivergenceError, match="with force=True to begin anew") as caught:
        train(dataset, Breaks(2), out=tmp_path / "run")
    assert "last good state" not in str(caught.value)


def test_nan_loses_no_best_epoch_that_was_only_in_memory(
    dataset: PreparedDataset,
    scores: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores(0.1, 0.2, 0.3)
    out, model = tmp_path / "run", small_model(dataset)
    weights: list[Tensor] = []

    def remember(_: object) -> None:
        weights.append(model.catalogue.detach().clone())

    monkeypatch.setattr(Checkpointer, "due", lambda *_: False)  # nothing is saved before the end
    with pytest.raises(DivergenceError, match="the best epoch so far, 2, is in"):
        train(dataset, Breaks(8), model=model, epochs=3, out=out, on_epoch=remember)
    tensors, metadata = read_tensors(out / "best.safetensors")
    assert metadata["epoch"] == 2
    assert torch.equal(tensors["catalogue"], weights[1])


@ONE_STEP
def test_broken_weights_are_noticed_though_the_loss_is_fine(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    model = small_model(dataset)

    class Poisons(CrossEntropy):
        def forward(self, *arguments: Any, **options: Any) -> Tensor:
            loss = super().forward(*arguments, **options)
            loss.register_hook(lambda gradient: gradient * torch.inf)
            return loss

    with pytest.raises(DivergenceError, match="weights stopped being numbers in epoch 1"):
        train(dataset, Poisons(), model=model, batch_size=64, out=tmp_path / "run")
    assert not (tmp_path / "run" / "resume.safetensors").exists()


# --- what is written


def test_the_records_of_a_run(dataset: PreparedDataset, tmp_path: Path) -> None:
    out = tmp_path / "run"
    seen: list[dict[str, Any]] = []
    result = train(
        dataset,
        ScalableCrossEntropy(n_buckets=4, coverage=False, bucket_size_x=5, bucket_size_y=6),
        evaluate_every=2,
        out=out,
        on_epoch=seen.append,
    )
    run = Run.open(out)
    assert run.metrics() == seen == result.history
    first, second = seen
    assert first["epoch"] == 1
    assert first["steps"] == 3
    targets = (dataset.train.lengths - 1).clip(max=6).sum()
    assert first["targets"] == targets
    assert first["tokens_per_second"] == pytest.approx(targets / first["seconds"]["training"])
    assert first["validation"] is None
    assert first["memory_mib"]["evaluation"] is None
    assert first["memory_mib"]["training"] > 10
    assert not first["best"]
    assert second["best"]
    assert second["seconds"]["evaluation"] > 0
    assert set(second["buckets"]) == set(BucketStatistics._fields)
    assert all(0 < share <= 1 for share in second["buckets"].values())
    assert run.derived["n_buckets"] == 4
    assert run.derived["bucket_size_y"] == 6
    written = run.result()
    assert written is not None
    assert written["test"] == result.test
    assert written["popularity"]["validation"]["ndcg@10"] > 0
    assert written["best_epoch"] == 2
    assert json.loads((out / "run.json").read_text())["config"]["training"]["epochs"] == 2


def test_without_test_users_the_last_weights_are_kept(tmp_path: Path) -> None:
    data = make_cycle(tmp_path / "data", test=0)
    model = small_model(data)
    with pytest.warns(TrainingWarning, match=r"no test users.* after 2 epochs, and"):
        result = train(data, model=model, out=tmp_path / "run")
    assert (result.best_epoch, result.test, result.validation) == (2, None, None)
    assert not model.training
    assert (tmp_path / "run" / "best.safetensors").exists()


def test_epochs_can_be_evaluated_on_a_sample_of_users(
    dataset: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[tuple[int, ...]]] = {"validation": [], "test": []}

    def remember(model: Any, data: PreparedDataset, *, split: Any, **options: Any) -> Metrics:
        asked[split].append(tuple(data.test.users))
        for row, user in enumerate(data.test.users):  # the events are theirs
            (place,) = np.flatnonzero(dataset.test.users == user)
            mine = data.test.items[slice(*data.test.offsets[row : row + 2])]
            theirs = dataset.test.items[slice(*dataset.test.offsets[place : place + 2])]
            assert np.array_equal(mine, theirs)
        return evaluate(model, data, split=split, **options)

    monkeypatch.setattr(trainer, "evaluate", remember)
    result = train(dataset, validation_users=7, out=tmp_path / "run")
    (sample,) = set(asked["validation"])  # the same at every epoch, and for popularity
    assert len(asked["validation"]) == 2 + 1
    assert len(sample) == 7
    assert set(asked["test"]) == {tuple(dataset.test.users)}
    assert result.users == {"validation": 7, "test": len(dataset.test)}
    train(dataset, validation_users=7, seed=3)
    assert set(asked["validation"]) == {sample}  # in every run, too
    written = Run.open(tmp_path / "run").result()
    assert written is not None
    assert written["users"] == result.users
    assert train(dataset, validation_users=99).users["validation"] == len(dataset.test)


def test_without_a_terminal_there_are_lines_within_an_epoch_and_while_evaluating(
    dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("_FIRST_LINE_SECONDS", "_LINE_SECONDS"):
        monkeypatch.setattr(f"sce.progress.{name}", 0.0)
    chosen = settings(evaluation_batch_size=8, epochs=1)
    fit(small_model(dataset), CrossEntropy(), dataset, settings=chosen)
    lines = capsys.readouterr().err.splitlines()
    assert re.match(r"sce: epoch 1/1: 2 of 3 steps .*loss \d\.\d+ .* left", lines[1])
    assert any(line.startswith("sce: evaluating validation: 8 of 24 users") for line in lines)
    assert any(line.startswith("sce: evaluating test: 16 of 24 users") for line in lines)


def test_evaluation_runs_where_the_steps_do(
    dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On another stream of a GPU it would make libraries keep another workspace.
    inside: list[bool] = [False]
    seen: list[bool] = []

    def on_stream(_: object, work: Callable[[], Any]) -> Any:
        inside[0] = True
        try:
            return work()
        finally:
            inside[0] = False

    def evaluate(*_: object, **__: object) -> Metrics:
        seen.append(inside[0])
        return Metrics({"ndcg@10": 0.5}, users=1, seen_targets=0)

    monkeypatch.setattr(TrainingStep, "on_capture_stream", on_stream)
    monkeypatch.setattr(trainer, "evaluate", evaluate)
    train(dataset)
    assert seen
    assert all(seen)


# --- the monitor of losses, and records


def test_an_epoch_sums_up() -> None:
    sums = {"once": 1.0, "all": 2.0}
    so_far = EpochSoFar(step=3, loss_sum=6.0, targets=4, statistics=sums, samples=2)
    record = make_record(7, so_far)
    assert (record["epoch"], record["loss"], record["steps"]) == (7, 1.5, 3)
    assert record["buckets"] == {"once": 0.5, "all": 1.0}
    start = make_record(0, EpochSoFar())
    assert [start[name] for name in ("loss", "buckets", "tokens_per_second")] == [None] * 3


def make_monitor(so_far: EpochSoFar) -> LossMonitor:
    return LossMonitor(so_far, epoch=4, device=torch.device("cpu"), statistics=("a", "b"))


def add(
    monitor: LossMonitor, step: int, loss: float, targets: int = 1, stats: bool = False
) -> None:
    statistics = torch.tensor([0.25, 0.5]) if stats else None
    monitor.add(StepResult(torch.tensor(loss), statistics), step, torch.tensor([step, 7]), targets)


def test_losses_count_once_checked() -> None:
    so_far = EpochSoFar()
    monitor = make_monitor(so_far)
    add(monitor, 1, 2.0, targets=10, stats=True)
    add(monitor, 2, 5.0, targets=20)
    assert so_far.step == 0
    monitor.check()
    assert (so_far.step, so_far.targets, so_far.loss_sum, monitor.last) == (2, 30, 120.0, 5.0)
    assert so_far.statistics == {"a": 0.25, "b": 0.5}
    record = make_record(1, so_far)
    assert (record["loss"], record["buckets"]) == (4.0, {"a": 0.25, "b": 0.5})
    monitor.check()
    assert so_far.targets == 30
    add(monitor, 3, 1.0, targets=5)
    monitor.check()
    assert (so_far.step, so_far.targets, so_far.loss_sum) == (3, 35, 125.0)


def test_when_one_checks_changes_nothing() -> None:
    losses = torch.rand(CHECK_EVERY, generator=torch.Generator().manual_seed(3)).tolist()
    often, rarely = EpochSoFar(), EpochSoFar()
    for so_far, each in [(often, True), (rarely, False)]:
        monitor = make_monitor(so_far)
        for step, loss in enumerate(losses, 1):
            assert not monitor.full
            add(monitor, step, loss, targets=step)
            if each:
                monitor.check()
        assert monitor.full != each
        monitor.check()
    assert often == rarely


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_the_first_loss_that_is_no_number_is_named(wrong: float) -> None:
    so_far = EpochSoFar()
    monitor = make_monitor(so_far)
    for step, loss in enumerate([1.0, 2.0, wrong, math.nan, 3.0], 11):
        add(monitor, step, loss)
    with pytest.raises(DivergenceError, match=rf"became {wrong} at step 13 of epoch 4") as caught:
        monitor.check()
    assert (caught.value.epoch, caught.value.step, caught.value.rows) == (4, 13, [13, 7])
    assert so_far.step == 12  # what was good before it
