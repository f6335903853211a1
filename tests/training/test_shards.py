"""A sharded catalogue in training: by some processes, and by one."""

import json
import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sce.cli import main
from sce.cli.train import with_shards
from sce.config import Config
from sce.data.prepared import PreparedDataset
from sce.distributed import Ranks
from sce.errors import InputError, RankError
from sce.losses import CrossEntropy, ScalableCrossEntropy
from sce.models.sasrec import SASRec
from sce.recommend import Recommender
from sce.training import shards
from sce.training.checkpoint import read_tensors
from sce.training.settings import TrainingSettings
from sce.training.shards import settle
from sce.training.signals import TrainingInterrupted
from tests.cycle_data import MODEL, make_cycle, train
from tests.distributed.pool import hold_store, run_launched

needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)
pytestmark = pytest.mark.filterwarnings("ignore::sce.errors.TrainingWarning")
ITEMS = 31


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cycle(tmp_path_factory.mktemp("data") / "cycle", items=ITEMS).path


class Struck(SASRec):
    """Sends a signal to its own process, if that is rank 1 at its first attempt, at some step."""

    calls, signal, phase, at = 0, signal.SIGINT, True, 3

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        first, now = (
            os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0",
            self.training == self.phase,
        )
        self.calls += now
        if first and os.environ.get("RANK") == "1" and now and self.calls == self.at:
            os.kill(os.getpid(), self.signal)
        return super().forward(*inputs, **options)


class StruckLate(Struck):
    """Is sent the signal in the evaluation of an epoch."""

    phase, at = False, 2


class Killed(Struck):
    signal = signal.SIGKILL


class Broken(Struck):
    """Gives states that are not numbers, on rank 1, in the second epoch."""

    at = 8

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        states = SASRec.forward(self, *inputs, **options)
        self.calls += self.training
        broken = os.environ.get("RANK") == "1" and self.calls >= self.at
        return states * torch.nan if broken else states


class Crowded(Struck):
    """The disk of rank 0 is full when it is to write the best weights."""

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get("RANK") == "0":
            shards.write_tensors = refuse  # type: ignore[assignment, attr-defined]
        return SASRec.forward(self, *inputs, **options)


def refuse(*_: Any) -> None:
    raise InputError("cannot write best.safetensors: no space left on device")


LOSSES = {
    "coverage": ScalableCrossEntropy(bucket_size_y=7),
    "paper's rule": ScalableCrossEntropy.paper(bucket_size_y=7, bucket_size_x=3),
}


def run(
    out: Path | None,
    data: Path,
    name: str = "coverage",
    kind: type[SASRec] = SASRec,
    **changes: Any,
) -> dict[str, Any]:
    """Train with 5 sequences a batch, so that the last step has batches that are empty."""
    dataset = PreparedDataset.load(data)
    model = kind(dataset.n_items, MODEL, dropout=0.2)
    given = {"batch_size": 5, "shard_catalogue": True} | changes
    result = train(dataset, LOSSES[name], model=model, out=out, **given)
    found = {"test": result.test, "loss": [record["loss"] for record in result.history]}
    weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return found | {"validation": result.validation, "weights": weights}


def as_rank(rank: int, directory: Path, given: Any, changes: dict[str, Any]) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int("resume" in changes))
    torch.set_num_threads(1)
    try:
        found: Any = run(directory / "run", *given, **changes)
    except (TrainingInterrupted, InputError, RankError) as error:
        found = f"{type(error).__name__}: {error}"
    (directory / str(rank)).write_text(json.dumps(found))


def by_ranks(size: int, directory: Path, *given: Any, **changes: Any) -> list[Any]:
    directory.mkdir(exist_ok=True)
    assert run_launched(size, as_rank, directory, given, changes) == [0] * size
    return [json.loads((directory / str(rank)).read_text()) for rank in range(size)]


def files(directory: Path) -> dict[str, Any]:
    """What training left, without the times."""
    place = directory / "run"
    state = json.loads((place / "resume" / "latest.json").read_text())["state"]
    kept = sorted((place / "resume" / state).glob("table-*.safetensors"))
    best, about = read_tensors(place / "best.safetensors")
    about.pop("run")  # which has the name of the model
    return {
        "state": [state, [file.read_bytes() for file in kept]],
        "best": {name: tensor.tolist() for name, tensor in best.items()} | about,
        "ranks": (place / "test_ranks.npy").read_bytes(),
    }


@pytest.fixture(scope="module")
def two_batches(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[Any, Any]:
    """What one process gives and leaves that accumulates two batches a step."""
    place = tmp_path_factory.mktemp("alone")
    (found,) = by_ranks(1, place, data, accumulate=2)
    return found, files(place)


@needs_gloo
def test_two_ranks_give_what_one_process_accumulates(
    tmp_path: Path, data: Path, two_batches: tuple[Any, Any]
) -> None:
    alone, left = two_batches
    assert by_ranks(2, tmp_path, data) == 2 * [alone]
    assert files(tmp_path) == left


@needs_gloo
@pytest.mark.parametrize(("size", "name"), [(2, "paper's rule"), (3, "coverage")])
def test_ranks_give_what_one_process_accumulates(
    size: int, name: str, tmp_path: Path, data: Path
) -> None:
    (alone,) = by_ranks(1, tmp_path / "alone", data, name, accumulate=size, epochs=1)
    assert by_ranks(size, tmp_path / "ranks", data, name, epochs=1) == size * [alone]
    assert files(tmp_path / "ranks") == files(tmp_path / "alone")


@needs_gloo
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ranks_that_share_a_gpu_give_what_one_process_does(tmp_path: Path, data: Path) -> None:
    given: Any = {"device": "cuda", "deterministic": True}
    (alone,) = by_ranks(1, tmp_path / "alone", data, accumulate=2, **given)
    assert by_ranks(2, tmp_path / "ranks", data, **given) == 2 * [alone]
    assert files(tmp_path / "ranks") == files(tmp_path / "alone")


@needs_gloo
def test_ranks_that_accumulate_as_well(tmp_path: Path, data: Path) -> None:
    (alone,) = by_ranks(1, tmp_path / "alone", data, accumulate=4, epochs=1)
    assert by_ranks(2, tmp_path / "ranks", data, accumulate=4, epochs=1) == 2 * [alone]


def test_it_is_the_row_wise_training_of_one_process(data: Path) -> None:
    sharded = run(None, data, accumulate=2)
    whole = run(None, data, accumulate=2, shard_catalogue=None, row_wise=True)
    assert sharded["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert sharded["validation"] == pytest.approx(whole["validation"], abs=0.1)
    for name, values in whole["weights"].items():
        found = sharded["weights"][name]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(values), rtol=1e-2, atol=1e-2)


@needs_gloo
def test_a_signal_to_one_rank_saves_once_and_another_number_goes_on(
    tmp_path: Path, data: Path, two_batches: tuple[Any, Any]
) -> None:
    said = by_ranks(2, tmp_path, data, "coverage", Struck)
    place, (alone, left) = tmp_path / "run", two_batches
    assert said == 2 * [
        f"TrainingInterrupted: stopped in epoch 1 after step 3 of 5; everything is saved in {place}"
    ]
    assert not list(place.rglob(".*"))
    with pytest.warns(match="was stopped before its first evaluation"):
        latest = Recommender.load(place, "cpu", model=SASRec(ITEMS, MODEL))
    assert latest.model.catalogue.shape == (ITEMS, MODEL.dim)
    assert by_ranks(1, tmp_path, data, "coverage", Struck, resume=True) == [alone]
    assert files(tmp_path) == left


@needs_gloo
def test_a_signal_in_an_evaluation_is_noticed_by_all(
    tmp_path: Path, data: Path, two_batches: tuple[Any, Any]
) -> None:
    changes: Any = {"evaluation_batch_size": 3}
    said = by_ranks(2, tmp_path, data, "coverage", StruckLate, **changes)
    assert all("stopped in epoch 1 after step 5 of 5; everything is saved" in one for one in said)
    found = by_ranks(2, tmp_path, data, "coverage", StruckLate, **changes, resume=True)
    assert found == 2 * [two_batches[0]]


@needs_gloo
def test_epochs_of_one_process_go_on_in_several(tmp_path: Path, data: Path) -> None:
    """The best epoch, the first, is not the last one that was saved."""
    rates = {"learning_rate": 1.0, "catalogue_learning_rate": 1.0, "epochs": 4}
    (whole,) = by_ranks(1, tmp_path / "alone", data, accumulate=2, **rates)
    by_ranks(1, tmp_path / "ranks", data, accumulate=2, **rates | {"epochs": 2})
    assert by_ranks(2, tmp_path / "ranks", data, **rates, resume=True) == 2 * [whole]
    assert files(tmp_path / "ranks") == files(tmp_path / "alone")


@needs_gloo
def test_a_rank_that_dies_ends_the_others_and_training_goes_on(
    tmp_path: Path, data: Path, two_batches: tuple[Any, Any]
) -> None:
    given = (data, "coverage", Killed), {"save_minutes": 0.0}
    assert run_launched(2, as_rank, tmp_path, *given) == [0, -signal.SIGKILL]
    said = json.loads((tmp_path / "0").read_text())
    assert said == "RankError: no answer from rank 1: killed, stopped, or cut off"
    state = json.loads((tmp_path / "run" / "resume" / "latest.json").read_text())["state"]
    assert state in ("state-1", "state-2")
    assert by_ranks(2, tmp_path, *given[0], resume=True) == 2 * [two_batches[0]]


@needs_gloo
def test_a_loss_that_is_no_number_ends_all_ranks_alike(tmp_path: Path, data: Path) -> None:
    for said in by_ranks(2, tmp_path, data, "coverage", Broken):
        assert said.startswith("DivergenceError: the loss became nan at step 3 of epoch 2")
    assert read_tensors(tmp_path / "run" / "best.safetensors")[1]["epoch"] == 1


@needs_gloo
def test_a_full_disk_of_one_rank_ends_all_and_training_goes_on(
    tmp_path: Path, data: Path, two_batches: tuple[Any, Any]
) -> None:
    fault = "cannot write best.safetensors: no space left on device"
    said = by_ranks(2, tmp_path, data, "coverage", Crowded)
    assert said == [f"InputError: {fault}", f"RankError: rank 0 ended: {fault}"]
    assert not (tmp_path / "run" / "best.safetensors").exists()
    assert by_ranks(1, tmp_path, data, "coverage", Crowded, resume=True) == [two_batches[0]]


def command(rank: int, directory: Path, data: Path, attempt: int) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    options = ["--epochs", "1", "--device", "cpu", "--model.dim", "8"]
    options += ["--training.shard-catalogue", "--loss.bucket-size-y", "7"]
    file = (directory / f"{rank}.txt").open("w")
    with file, redirect_stdout(file), redirect_stderr(file):
        code = main(["train", str(data), "--out", str(directory / "run"), *options])
    assert code == 0


@needs_gloo
def test_the_run_is_like_any_other(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = hold_store()
    for attempt, said in enumerate(["NDCG@10", "training has ended already"]):
        assert run_launched(2, command, tmp_path, data, attempt, store=store) == [0, 0]
        assert said in (tmp_path / "0.txt").read_text()
        assert (tmp_path / "1.txt").read_text() == ""
    out = str(tmp_path / "run")
    before = (tmp_path / "run" / "test_ranks.npy").read_bytes()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert main(["evaluate", out, "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["ndcg@10"] == result["test"]["ndcg@10"]
    assert (tmp_path / "run" / "test_ranks.npy").read_bytes() == before
    if find_spec("altair"):
        assert main(["report", out]) == 0
    table = Recommender.load(out, "cpu").model.catalogue
    assert table.shape == (ITEMS, 8)
    assert table.std() > 0.1


@pytest.mark.parametrize(
    ("loss", "model", "says"),
    [
        (CrossEntropy(), None, "needs the loss sce, as a mean"),
        (ScalableCrossEntropy(reduction="sum"), None, "needs the loss sce, as a mean"),
        (ScalableCrossEntropy(), nn.Embedding(ITEMS, 8), "needs a sce.models.base.Backbone"),
    ],
)
def test_other_losses_and_models_are_refused(loss: Any, model: Any, says: str, data: Path) -> None:
    if model is not None:
        model.catalogue = model.weight
    with pytest.raises(InputError) as refusal:
        train(PreparedDataset.load(data), loss, model=model, shard_catalogue=True)
    assert says in str(refusal.value)


@pytest.mark.parametrize("name", ["compile", "capture"])
def test_steps_of_a_fixed_shape_are_refused(name: str) -> None:
    given: Any = {name: True}
    with pytest.raises(InputError, match=f"^{name} does not go with shard_cat"):
        TrainingSettings(shard_catalogue=True, **given)


class Fake:
    """Two ranks with GPUs, as far as settling needs them."""

    size, device = 2, torch.device("cuda:0")

    def gather_counts(self, number: int) -> list[list[int]]:
        return [[number], [0]]


@pytest.mark.parametrize(
    ("gigabytes", "row_wise", "compiled", "needed"),
    [(80, False, False, True), (80, True, False, False), (20, True, False, True),
     (10, True, False, False), (80, False, True, False), (140, False, False, False)],
)  # fmt: skip
def test_gpus_that_are_too_small_get_shards(
    gigabytes: int,
    row_wise: bool,
    compiled: bool,
    needed: bool,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A hundred million items: with Adam 102 GB, row-wise 26 GB, in two shards 13 GB each."""
    gpu = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    dataset: Any = SimpleNamespace(train=PreparedDataset.load(data).train, n_items=10**8)
    settings = TrainingSettings(row_wise=row_wise, compile=compiled)
    ranks: Any = Fake()
    model, loss = SASRec(3), ScalableCrossEntropy()
    found, note = settle(settings, model, loss, dataset, ranks, {})
    assert (found.accumulate, found.shard_catalogue) == (2, True if needed else None)
    assert ("one GPU is too small" in note) == needed
    assert settle(settings, model, CrossEntropy(), dataset, ranks, {})[1] == ""
    monkeypatch.setenv("WORLD_SIZE", "2")
    chosen = Config.compose({"training": {"row_wise": row_wise, "compile": compiled}})
    chosen = with_shards(chosen, dataset, ranks.device, {}, first=True)
    assert bool(chosen.training.shard_catalogue) == needed
    assert ("one GPU is too small" in capsys.readouterr().err) == needed


def test_what_was_begun_with_shards_goes_on_with_them(data: Path) -> None:
    begun = {"accumulate": 2, "shard_catalogue": True}
    dataset, ranks = PreparedDataset.load(data), Ranks()
    found, _ = settle(TrainingSettings(), SASRec(3), ScalableCrossEntropy(), dataset, ranks, begun)
    assert (found.accumulate, found.shard_catalogue, found.row_wise) == (2, True, True)
    chosen = with_shards(Config.compose({}), dataset, ranks.device, begun, first=True)
    assert chosen.build(dataset)[0].catalogue.is_meta
