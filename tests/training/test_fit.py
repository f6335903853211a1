import os
import random
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn

from sce.data.batches import DeviceSequences
from sce.data.length_groups import LengthGroups
from sce.data.prepared import PreparedDataset
from sce.errors import InputError
from sce.evaluation.evaluate import evaluate
from sce.evaluation.ranking import Popularity
from sce.losses import (
    LOSSES,
    CrossEntropy,
    InBatchNegatives,
    Loss,
    LossSettings,
    SampledCrossEntropy,
    ScalableCrossEntropy,
)
from sce.models.registry import BACKBONES, DEFAULT_BACKBONE
from sce.models.sasrec import SASRec
from sce.planning import summarize_data
from sce.training import fit as fit_module
from sce.training.fit import TrainingWarning, fit
from sce.training.run import Run
from sce.training.step import TrainingStep
from tests.cycle_data import QUICK, make_cycle, settings, small_model, train


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# --- learning


def small_loss(name: str, dataset: PreparedDataset) -> Loss:
    options: dict[str, Any] = {"bucket_size_y": 6, "n_negatives": 8}
    kind: Any = LOSSES[name].settings
    chosen: LossSettings = kind(**{key: options[key] for key in options if hasattr(kind(), key)})
    data = summarize_data(dataset.train, dataset.n_items, batch_size=16, max_length=6)
    return chosen.build(data)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_learns_and_beats_popularity(
    name: str, dataset: PreparedDataset, tmp_path: Path
) -> None:
    result = train(
        dataset,
        small_loss(name, dataset),
        epochs=8,
        batch_size=8,
        learning_rate=3e-2,
        out=tmp_path / "run",
    )
    losses = [record["loss"] for record in result.history]
    assert losses[-1] < 0.5 * losses[0]
    assert result.test["hr@1"] > 0.8
    assert result.test["hr@1"] > 1.5 * result.popularity["test"]["hr@1"]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("backbone", sorted({*BACKBONES} - {DEFAULT_BACKBONE}))
def test_every_backbone_learns_with_every_loss(
    backbone: str, name: str, dataset: PreparedDataset
) -> None:
    kind: Any = BACKBONES[backbone].settings
    model = kind(dim=16, blocks=1, dropout=0.0, max_length=6).build(dataset.n_items)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    result = train(dataset, small_loss(name, dataset), model=model, epochs=10, learning_rate=3e-2)
    assert model.draws or result.test["hr@1"] > 0.7  # of few masked items it learns slowly
    assert [key for key, weight in model.named_parameters() if weight.equal(before[key])] == []


def test_the_model_is_left_with_what_the_result_says(dataset: PreparedDataset) -> None:
    model = small_model(dataset)
    result = train(dataset, model=model)
    first, validation, test, cost = repr(result).splitlines()
    assert first == f"FitResult(best epoch {result.best_epoch} of {result.epochs}, ended by epochs"
    assert f"  validation: ndcg@10 {result.validation['ndcg@10']:.4f}, hr@10 " in validation
    assert f"  test: ndcg@10 {result.test['ndcg@10']:.4f}, hr@10 " in test
    assert re.fullmatch(r"  training: [\d.]+ m?s, peak [\d.,]+ [MG]iB \(.*\), on cpu.*\)", cost)
    assert not model.training
    assert model.catalogue.device == torch.device("cpu")
    assert evaluate(model, dataset, split="test").values == result.test
    assert evaluate(model, dataset).values == result.validation
    for split, whole in [("validation", result.validation), ("test", result.test)]:
        parts = result.by_popularity[split].values()
        assert sum(part["users"] for part in parts) == len(dataset.test)
        for name, value in whole.items():
            if not name.startswith("cov@"):
                total = sum(part["users"] * part[name] for part in parts)
                assert total / len(dataset.test) == pytest.approx(value)
    popular = Popularity(dataset.train, dataset.n_items)
    assert result.popularity == {
        split: evaluate(popular, dataset, split=split).values for split in ("validation", "test")
    }


class Averages(nn.Module):
    """A model of one's own: the state is the mean of the items so far. No maximum length."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.table = nn.Embedding(items, 8)
        self.turn = nn.Linear(8, 8)

    @property
    def catalogue(self) -> Tensor:
        return self.table.weight

    def forward(self, histories: Tensor) -> Tensor:
        real = (histories >= 0).unsqueeze(2)
        events = self.table(histories.clamp(min=0)) * real
        states: Tensor = self.turn(events.cumsum(1) / real.cumsum(1).clamp(min=1))
        return states


class Short(Averages):
    def __init__(self, max_length: Any) -> None:
        super().__init__(12)
        self.max_length = max_length


def test_a_model_may_take_any_length(dataset: PreparedDataset) -> None:
    assert train(dataset, model=Short(None)).epochs


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": 3}, r"config\['model'\] must be a dictionary; got 3"),
        ({"training": None}, r"config\['training'\] must be a dictionary; got None"),
        ({"loss": {"name": 3}}, r"loss.name of config is missing, or of another kind"),
        ({"start": 5}, "start of config is missing, or of another kind"),
        ({"model": {"dim": {8}}}, "config is kept as JSON, and cannot be: .* set"),
        (
            {"mine": {"share": float("nan")}},
            "config is kept as JSON, and cannot be: Out of range float",
        ),
    ],
)
def test_a_config_that_run_json_cannot_hold(
    config: dict[str, Any], message: str, dataset: PreparedDataset, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        train(dataset, config=config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_and_a_loss_of_ones_own(dataset: PreparedDataset, tmp_path: Path) -> None:
    def squared(states: Tensor, catalogue: Tensor, targets: Tensor) -> Tensor:
        real = targets >= 0
        return (states[real] - catalogue[targets[real]]).square().mean()

    model = Averages(dataset.n_items)
    result = train(dataset, squared, model=model, out=tmp_path / "run")
    assert result.history[1]["loss"] < result.history[0]["loss"]
    run = Run.open(tmp_path / "run")
    assert run.model.endswith("Averages")
    assert "squared" in run.config["loss"]["name"]


class Unaware(Averages):
    """Looks padding up."""

    def forward(self, histories: Tensor) -> Tensor:
        states: Tensor = self.table(histories)
        return states


def test_a_model_that_looks_padding_up_is_told_what_it_is(dataset: PreparedDataset) -> None:
    with pytest.raises(InputError, match=r"Unaware .* padded with sce.PADDING, which is -1 and no"):
        train(dataset, model=Unaware(dataset.n_items))


def test_an_index_error_of_the_loss_is_its_own(dataset: PreparedDataset) -> None:
    def wrong(states: Tensor, catalogue: Tensor, targets: Tensor) -> Tensor:
        raise IndexError("of the loss")

    with pytest.raises(IndexError, match="of the loss"):
        train(dataset, wrong, model=Averages(dataset.n_items))


def test_a_loss_is_given_the_generator_of_its_step(dataset: PreparedDataset) -> None:
    seen: list[int] = []

    class Own(Loss):
        def forward(
            self,
            *arguments: Any,
            generator: torch.Generator | None = None,
            max_targets: int | None = None,
        ) -> Tensor:
            assert generator is not None
            assert max_targets is None  # an eager step counts its targets
            seen.append(generator.initial_seed())
            found: Tensor = CrossEntropy()(*arguments)
            return found

    train(dataset, Own())
    assert len(set(seen)) == len(seen) == 2 * 3


def test_a_plain_function_is_called_with_three_arguments_and_seeded(
    dataset: PreparedDataset,
) -> None:
    drawn: list[float] = []

    def own(states: Tensor, catalogue: Tensor, targets: Tensor, generator: object = None) -> Tensor:
        assert generator is None
        drawn.append(torch.rand(()).item())
        found: Tensor = CrossEntropy()(states, catalogue, targets)
        return found

    for _ in range(2):
        torch.rand(3)  # whatever the world did before
        train(dataset, own)
    assert drawn[:6] == drawn[6:]
    assert len(set(drawn)) == 6


def test_sizes_of_buckets_follow_from_the_mean_batch_as_by_the_command_line(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    given = set()

    class Own(ScalableCrossEntropy):
        def with_statistics(self, *arguments: Any, **options: Any) -> Any:
            given.add(options["max_targets"])
            return super().with_statistics(*arguments, **options)

    loss = Own()
    train(dataset, loss, out=tmp_path / "run")
    data = summarize_data(dataset.train, dataset.n_items, batch_size=16, max_length=6)
    by_name: Any = LOSSES["sce"].settings().build(replace(data, cpu=True))
    (targets,) = given  # the same at every step
    assert loss.sizes(dataset.n_items, targets, cpu=True) == by_name.sizes(dataset.n_items, 1)
    derived = Run.open(tmp_path / "run").derived
    assert by_name.named_sizes(dataset.n_items, 1).items() <= derived.items()
    assert derived["targets_per_batch"] == round(data.targets, 1)


# --- the same again


def test_the_same_seed_gives_the_same_weights_and_another_others(dataset: PreparedDataset) -> None:
    models = [small_model(dataset) for _ in range(3)]
    for model, seed in zip(models, (5, 5, 6), strict=True):
        torch.manual_seed(seed * int(torch.randint(1000, ())))  # whatever the world did before
        train(dataset, ScalableCrossEntropy(bucket_size_y=6), model=model, seed=seed)
    assert same_weights(models[0], models[1])
    assert not same_weights(models[0], models[2])


def test_what_is_set_reaches_the_step_and_the_optimizer(
    dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[TrainingStep] = []

    def remember(*arguments: Any, **options: Any) -> TrainingStep:
        steps.append(TrainingStep(*arguments, **options))
        return steps[0]

    monkeypatch.setattr(fit_module, "TrainingStep", remember)
    given: dict[str, Any] = {"betas": (0.8, 0.9), "weight_decay": 0.25}
    train(dataset, epochs=1, clip_norm=0.5, precision="bf16", learning_rate=1e-4, **given)
    assert (steps[0].clip_norm, steps[0].autocast) == (0.5, True)
    (group,) = steps[0].optimizer.param_groups
    assert {name: group[name] for name in given} == given
    assert group["initial_lr"] == 1e-4


def test_the_worlds_random_numbers_are_left_alone(dataset: PreparedDataset) -> None:
    before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()  # noqa: NPY002
    train(dataset, ScalableCrossEntropy(bucket_size_y=6))
    after = torch.get_rng_state(), str(np.random.get_state()), random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


# --- settings that change the step


@pytest.mark.filterwarnings("error:mkldnn_matmul", "ignore:bf16 is slower")
def test_bf16_trains(dataset: PreparedDataset) -> None:
    result = train(dataset, epochs=6, precision="bf16", clip_norm=1.0, schedule="warmup-cosine")
    assert result.history[-1]["loss"] < 0.9 * result.history[0]["loss"]


def test_a_compiled_model_sees_one_shape(
    dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = set()

    def pretend(model: nn.Module, **_: object) -> Callable[..., Tensor]:
        def call(histories: Tensor, length_groups: LengthGroups) -> Tensor:
            shapes.add((tuple(histories.shape), length_groups))
            states: Tensor = model(histories, length_groups)
            return states

        return call

    monkeypatch.setattr(torch, "compile", pretend)
    # 48 users: 20 + 20 + 8, and the last batch is not compiled for.
    train(dataset, compile=True, batch_size=20)
    ((shape, groups),) = shapes
    assert shape == (20, 6)
    assert sum(rows for rows, _ in groups) == 20


def test_a_compiled_model_trains_as_it_does_by_itself(
    dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(dataset, batch_size=20)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compiled = train(dataset, batch_size=20, compile=True)
    assert compiled.history[-1]["loss"] == pytest.approx(plain.history[-1]["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("deterministic", "told"), [(True, "same_bits"), (False, "spare_workspace")]
)
def test_libraries_are_told_to_keep_little_memory_or_to_give_the_same_bits(
    dataset: PreparedDataset, deterministic: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[str] = []

    def enter(name: str) -> Any:
        entered.append(name)
        return nullcontext()

    for name in ("same_bits", "spare_workspace"):
        monkeypatch.setattr(fit_module, name, lambda _, name=name: enter(name))
    train(dataset, deterministic=deterministic)
    assert entered == [told]


def test_the_device_holds_no_dataset_that_does_not_fit(
    dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = []
    place = DeviceSequences.place

    def remember(sequences: Any, device: Any, *, times: bool) -> Any:
        assert not times
        placed.append(str(device))
        return place(sequences, "cpu")

    monkeypatch.setattr(DeviceSequences, "place", remember)
    monkeypatch.setattr(fit_module, "free_memory", lambda _: 100)
    fit_module._place(dataset, torch.device("meta"))
    monkeypatch.setattr(fit_module, "free_memory", lambda _: 10**9)
    fit_module._place(dataset, torch.device("meta"))
    assert placed == ["cpu", "meta"]


# --- warnings and refusals


def test_what_a_user_would_regret_not_knowing(tmp_path: Path) -> None:
    data = make_cycle(tmp_path / "data", single=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(
            data, ScalableCrossEntropy(bucket_size_y=99), epochs=1, batch_size=100, precision="tf32"
        )
    texts = [str(one.message) for one in caught if one.category is TrainingWarning]
    assert len(texts) == 4
    assert "5 of 53 training users have a single event" in texts[0]
    assert "48 training users and a batch has 100" in texts[1]
    assert texts[1].endswith("consider a smaller batch_size")
    assert "bucket_size_y is 99 and the catalogue has 12 items" in texts[2]
    assert "tf32 is a precision of GPUs" in texts[3]
    assert "--" not in "".join(texts)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda data: nn.Linear(2, 2), "has a tensor `catalogue`"),
        (lambda data: SASRec(5), "5 items and the dataset 12"),
        (lambda data: Short("3"), "max_length must be a whole number of 64 bits or None; got '3'"),
        (lambda data: Short(-3), "max_length must be at least 1; it is -3"),
    ],
)
def test_models_that_do_not_fit_are_refused(
    model: Callable[[PreparedDataset], nn.Module], message: str, dataset: PreparedDataset
) -> None:
    with pytest.raises(InputError, match=message):
        train(dataset, model=model(dataset))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (CrossEntropy(reduction="none"), r"scalar tensor; got \[16, 6\]"),
        (lambda *given: CrossEntropy()(*given).item(), "must be a scalar tensor; got float"),
        (lambda *given: CrossEntropy()(*given).detach(), "depends on no parameter"),
    ],
)
def test_what_is_no_loss_to_train_on(loss: Any, message: str, dataset: PreparedDataset) -> None:
    with pytest.raises(InputError, match=message):
        train(dataset, loss)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "data/clicks"}, r"PreparedDataset.load\(path\), or .*; got 'data/clicks'"),
        ({"dataset": pl.DataFrame({"a": [1]})}, r"prepare\(frame, path\); .* of type DataFrame$"),
        ({"loss": "sce"}, "a loss is a function of states, catalogue and targets, .* got 'sce'"),
        ({"loss": nn.CrossEntropyLoss()}, "own, of logits, is not; got CrossEntropyLoss"),
        ({"loss": SASRec(3)}, "a loss is a function of .* got an object of type SASRec$"),
        ({"loss": CrossEntropy(ignore_index=0)}, "targets with -100; leave out the loss's"),
        ({"settings": {"epochs": 3}}, r"settings are TrainingSettings\(...\); got {'epochs': 3}"),
    ],
)
def test_what_is_no_dataset_loss_or_settings(
    changes: dict[str, Any], message: str, dataset: PreparedDataset
) -> None:
    given: dict[str, Any] = {"loss": CrossEntropy(), "dataset": dataset, "settings": QUICK}
    with pytest.raises(InputError, match=message):
        fit(small_model(dataset), **(given | changes))


def test_one_training_at_a_time_in_a_directory(dataset: PreparedDataset, tmp_path: Path) -> None:
    out = tmp_path / "run"
    refused = []

    def again(_: object) -> None:
        before = {file.name: file.read_bytes() for file in out.iterdir()}
        for option in ("resume", "force"):
            with pytest.raises(InputError, match=f"is being trained in by process {os.getpid()}"):
                train(dataset, out=out, **{option: True})  # type: ignore[arg-type]
            refused.append(option)
        assert {file.name: file.read_bytes() for file in out.iterdir()} == before

    train(dataset, epochs=1, out=out, on_epoch=again)
    assert refused == ["resume", "force"]
    train(dataset, out=out, resume=True)
    train(dataset, epochs=1, out=out, force=True, on_epoch=again)
    assert not (out / ".lock").exists()


def test_resuming_needs_a_run(dataset: PreparedDataset) -> None:
    with pytest.raises(InputError, match="name its directory"):
        train(dataset, resume=True)


def test_no_gpu_is_one_clear_error(dataset: PreparedDataset) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(InputError, match="device cuda was asked for, but"):
        train(dataset, device="cuda")


def test_memory_that_ran_out_is_said_with_what_helps(
    dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    with pytest.raises(
        InputError, match=r"memory ran out .CUDA out of memory.*ScalableCrossEntropy"
    ):
        train(dataset, run_out)


class Derived(SampledCrossEntropy):
    pass


class DerivedModel(SASRec):
    pass


def test_what_is_captured(dataset: PreparedDataset) -> None:
    model, gpu = small_model(dataset), torch.device("cuda", 0)
    in_batch = SampledCrossEntropy(3, negatives=InBatchNegatives())
    for loss, wanted, expected in (
        (CrossEntropy(), None, True),
        (SampledCrossEntropy(3), None, True),
        (SampledCrossEntropy(3), False, False),
        (in_batch, None, False),
        (Derived(3), None, False),  # may do on the host what it likes
        (lambda x, y, t: (x @ y.T).mean(), None, False),
        (in_batch, False, False),
        (lambda x, y, t: (x @ y.T).mean(), True, True),  # the user knows
    ):
        assert fit_module._can_capture(model, loss, settings(capture=wanted), gpu) is expected
    derived = DerivedModel(dataset.n_items, model.settings)
    assert fit_module._can_capture(derived, CrossEntropy(), settings(), gpu) is False
    with pytest.raises(
        InputError, match="lets nothing wait for the device, and this loss does: Sa"
    ):
        fit_module._can_capture(model, in_batch, settings(capture=True), gpu)
