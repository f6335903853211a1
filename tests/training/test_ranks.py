"""Training by several ranks, with the catalogue on each of them or in shards, and by one."""

import json
import signal
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from sce.cli import main
from sce.models.sasrec import SASRec
from sce.recommend import Recommender
from sce.training.checkpoint import read_tensors
from sce.training.run import Run
from tests.cycle_data import MODEL, make_cycle
from tests.distributed.pool import hold_store, run_launched
from tests.training.launched import (
    ITEMS,
    Broken,
    Crowded,
    Killed,
    Normed,
    Struck,
    StruckLate,
    as_rank,
    by_ranks,
    command,
    needs_gloo,
    run,
)
from tests.training.outcomes import outcome

pytestmark = [needs_gloo, pytest.mark.filterwarnings("ignore::sce.errors.TrainingWarning")]
both = pytest.mark.parametrize("name", ["replicated", "sharded"])
Alone = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cycle(tmp_path_factory.mktemp("data") / "cycle", items=ITEMS).path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[Alone]:
    """Yield what gives all that this process finds, accumulating the batches, and its run."""

    @cache
    def find(name: str, accumulate: int, **changes: Any) -> tuple[Any, Path]:
        place = tmp_path_factory.mktemp("alone") / "run"
        found = run(place, data, name, accumulate=accumulate, **changes)
        return json.loads(json.dumps(found)), place

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have
    yield find
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("size", "name"),
    [
        *((3, name) for name in ("replicated", "paper's rule", "row-wise", "a function", "a sum")),
        *((2, name) for name in ("sharded", "sharded, paper's rule")),
        (3, "sharded"),
    ],
)
def test_ranks_give_what_one_process_accumulates(
    size: int, name: str, tmp_path: Path, data: Path, alone: Alone
) -> None:
    found, whole = alone(name, size)
    assert by_ranks(size, tmp_path, data, name) == size * [found]
    assert outcome(tmp_path / "run") == outcome(whole)
    assert Run.open(tmp_path / "run").identity == Run.open(whole).identity


def test_ranks_that_score_otherwise_agree_on_the_best_epoch(tmp_path: Path, data: Path) -> None:
    one, other = by_ranks(2, tmp_path, data, "replicated", Normed, epochs=12, patience=1)
    assert one["validation"] != other["validation"]
    assert one["loss"] == other["loss"]  # of as many epochs
    kept = [
        {name: values for name, values in found["weights"].items() if "running" not in name}
        for found in (one, other)
    ]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("name", ["replicated", "paper's rule", "row-wise", "sharded"])
def test_ranks_that_accumulate_as_well(name: str, tmp_path: Path, data: Path, alone: Alone) -> None:
    assert by_ranks(2, tmp_path, data, name, accumulate=4) == 2 * [alone(name, 4)[0]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ranks_that_share_a_gpu_give_what_one_process_does(tmp_path: Path, data: Path) -> None:
    given: Any = {"device": "cuda", "deterministic": True}
    (found,) = by_ranks(1, tmp_path / "alone", data, "sharded", accumulate=2, **given)
    assert by_ranks(2, tmp_path / "ranks", data, "sharded", **given) == 2 * [found]
    assert outcome(tmp_path / "ranks" / "run") == outcome(tmp_path / "alone" / "run")


@both
def test_a_signal_to_one_rank_saves_once_and_another_number_goes_on(
    name: str, tmp_path: Path, data: Path, alone: Alone
) -> None:
    said = by_ranks(2, tmp_path, data, name, Struck)
    place, (found, whole) = tmp_path / "run", alone(name, 2)
    assert said == 2 * [
        f"TrainingInterrupted: stopped in epoch 1 after step 3 of 5; everything is saved in {place}"
    ]
    assert not list(place.rglob(".*"))
    with pytest.warns(match="was stopped before its first evaluation"):
        latest = Recommender.load(place, "cpu", model=SASRec(ITEMS, MODEL))
    assert latest.model.catalogue.shape == (ITEMS, MODEL.dim)
    assert by_ranks(1, tmp_path, data, name, Struck, resume=True) == [found]
    assert outcome(place) == outcome(whole)


def test_a_signal_within_a_step_of_one_rank_is_known_to_all(tmp_path: Path, data: Path) -> None:
    said = by_ranks(2, tmp_path, data, "replicated", Struck, accumulate=48, batch_size=1)
    assert said == 2 * [
        "TrainingInterrupted: stopped in epoch 1 after step 0 of 1; everything is saved in "
        f"{tmp_path / 'run'}"
    ]


def test_a_signal_in_an_evaluation_is_noticed_by_all(
    tmp_path: Path, data: Path, alone: Alone
) -> None:
    changes: Any = {"evaluation_batch_size": 3}
    given = tmp_path, data, "sharded", StruckLate
    said = by_ranks(2, *given, **changes)
    assert all("stopped in epoch 1 after step 5 of 5; everything is saved" in one for one in said)
    assert by_ranks(2, *given, **changes, resume=True) == 2 * [alone("sharded", 2)[0]]


def test_ranks_resume_together(tmp_path: Path, data: Path, alone: Alone) -> None:
    found, _ = alone("replicated", 2)
    by_ranks(2, tmp_path, data, "replicated", epochs=1)
    assert by_ranks(2, tmp_path, data, "replicated", resume=True) == 2 * [found]


def test_epochs_of_one_process_go_on_in_several(tmp_path: Path, data: Path, alone: Alone) -> None:
    """The best epoch, the first, is not the last one that was saved."""
    rates: dict[str, Any] = {"learning_rate": 1.0, "catalogue_learning_rate": 5.0, "epochs": 4}
    found, whole = alone("sharded", 2, **rates)
    assert outcome(whole)["best_epoch"] == 1
    given = tmp_path, data, "sharded"
    by_ranks(1, *given, accumulate=2, **rates | {"epochs": 2})
    assert by_ranks(2, *given, **rates, resume=True) == 2 * [found]
    assert outcome(tmp_path / "run") == outcome(whole)


def test_other_numbers_of_processes_are_refused(tmp_path: Path, data: Path) -> None:
    said = by_ranks(2, tmp_path, data, "replicated", accumulate=3)
    expected = "2 processes cannot share the 3 batches of a step equally (accumulate)"
    assert all(expected in each for each in said)


def test_a_rank_that_dies_ends_the_others_and_training_goes_on(
    tmp_path: Path, data: Path, alone: Alone
) -> None:
    given = data, "sharded", Killed
    ends = run_launched(2, as_rank, tmp_path, given, {"save_minutes": 0.0})
    assert ends == [0, -signal.SIGKILL]
    said = json.loads((tmp_path / "0").read_text())
    assert said == "RankError: no answer from rank 1: killed, stopped, or cut off"
    state = json.loads((tmp_path / "run" / "resume" / "latest.json").read_text())["state"]
    assert state in ("state-1", "state-2")
    assert by_ranks(2, tmp_path, *given, resume=True) == 2 * [alone("sharded", 2)[0]]


def test_a_loss_that_is_no_number_ends_all_ranks_alike(tmp_path: Path, data: Path) -> None:
    for said in by_ranks(2, tmp_path, data, "sharded", Broken):
        assert said.startswith("DivergenceError: the loss became nan at step 3 of epoch 2")
    assert read_tensors(tmp_path / "run" / "best.safetensors")[1]["epoch"] == 1


def test_a_full_disk_of_one_rank_ends_all_and_training_goes_on(
    tmp_path: Path, data: Path, alone: Alone
) -> None:
    given = tmp_path, data, "sharded", Crowded
    fault = "cannot write best.safetensors: no space left on device"
    assert by_ranks(2, *given) == [f"InputError: {fault}", f"RankError: rank 0 ended: {fault}"]
    assert not (tmp_path / "run" / "best.safetensors").exists()
    assert by_ranks(1, *given, resume=True) == [alone("sharded", 2)[0]]


FLAGS = {
    "replicated": ["--loss", "ce"],
    "sharded": ["--training.shard-catalogue", "--loss.bucket-size-y", "7"],
}


@both
def test_a_command_tells_once_goes_on_when_started_again_and_leaves_a_run_like_any_other(
    name: str, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, flags = hold_store(), FLAGS[name]
    for attempt, said in enumerate(["NDCG@10", "training has ended already"]):
        assert run_launched(2, command, tmp_path, data, attempt, *flags, store=store) == [0, 0]
        assert said in (tmp_path / "0.txt").read_text()
        assert (tmp_path / "1.txt").read_text() == ""
    out, ranks = str(tmp_path / "run"), tmp_path / "run" / "test_ranks.npy"
    before, result = ranks.read_bytes(), json.loads((tmp_path / "run" / "result.json").read_text())
    assert main(["evaluate", out, "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["ndcg@10"] == result["test"]["ndcg@10"]
    assert ranks.read_bytes() == before
    if find_spec("altair"):
        assert main(["report", out]) == 0
    table = Recommender.load(out, "cpu").model.catalogue
    assert table.shape == (ITEMS, 8)
    assert table.std() > 0.1


def test_a_command_that_is_started_again_takes_up_its_own_run_alone(
    tmp_path: Path, data: Path
) -> None:
    runs = []
    first, second, third = hold_store(), hold_store(), hold_store()
    for store, attempt, more, code, said in (
        (first, 0, (), 0, "NDCG@10"),
        (second, 1, ("--force",), 0, "NDCG@10"),  # the attempt before was killed early
        (second, 2, ("--force",), 0, "training has ended already"),
        (third, 1, (), 2, "exists; go on with --resume, replace it with --force"),
    ):
        flags = *FLAGS["replicated"], *more
        assert run_launched(1, command, tmp_path, data, attempt, *flags, store=store) == [code]
        assert said in (tmp_path / "0.txt").read_text()
        runs.append((tmp_path / "run").stat().st_ino)
    assert runs[0] != runs[1] == runs[2] == runs[3]
