"""Training that goes on from another run."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sce.data.prepared import PreparedDataset, write_prepared
from sce.data.vocabulary import Vocabulary
from sce.distributed.checkpoint import read_whole
from sce.errors import InputError, TrainingWarning
from sce.evaluation.ranking import rescore
from sce.losses import CrossEntropy, ScalableCrossEntropy
from sce.models.registry import BACKBONES
from sce.recommend import Recommender
from sce.training.checkpoint import read_tensors, write_tensors
from sce.training.fit import FitResult, fit
from sce.training.run import Run
from sce.training.signals import TrainingInterrupted
from sce.training.start import mean_neighbours, tell_start, unite_items
from tests.cycle_data import lay_out, settings, small_model, walk
from tests.training.outcomes import outcome, stop_at

ROW_WISE = {"row_wise": True, "catalogue_learning_rate": 0.1}


def sce_loss() -> ScalableCrossEntropy:
    return ScalableCrossEntropy(n_buckets=4, coverage=False, bucket_size_x=5, bucket_size_y=6)


def go_on(
    dataset: PreparedDataset, out: Path | None, start_from: Path | None, **changes: Any
) -> FitResult:
    options = {n: changes.pop(n) for n in ("resume", "on_epoch", "force") if n in changes}
    if (source := start_from or (out if options.get("resume") else None)) is not None:
        dataset = unite_items(dataset, source)
    model = changes.pop("model", small_model)(dataset)
    loss = sce_loss() if changes.get("row_wise") else CrossEntropy()
    return fit(
        model,
        loss,
        dataset,
        settings=settings(**changes),
        out=out,
        start_from=start_from,
        progress=False,
        **options,
    )


@pytest.fixture(scope="module")
def old(dataset: PreparedDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("old") / "run"
    go_on(dataset, out, None, epochs=3)
    return out


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """Items 102 to 111 of the ring, and new ones: 50, 1040 and 2000."""
    ids = [50, *range(102, 112), 1040, 2000]
    walks = [walk(start, 7, len(ids)) for start in range(len(ids))] * 3
    return write_prepared(
        tmp_path_factory.mktemp("data") / "grown",
        train=lay_out(walks, range(len(walks))),
        test=lay_out(walks[:9], range(len(walks), len(walks) + 9)),
        user_ids=Vocabulary.from_integers(range(len(walks) + 9)),
        item_ids=Vocabulary.from_integers(ids),
        settings={},
        counts={},
    )


def optimizer_state(run: Path) -> dict[str, Tensor]:
    tensors, _ = read_tensors(run / "resume.safetensors")
    return {name: value for name, value in tensors.items() if name.startswith("optimizer.")}


@pytest.mark.parametrize("changes", [{}, ROW_WISE], ids=["adam", "row-wise"])
def test_on_the_same_data_the_first_evaluation_is_the_best_one_of_before(
    changes: dict[str, Any], dataset: PreparedDataset, tmp_path: Path
) -> None:
    before = go_on(dataset, tmp_path / "old", None, **changes)
    best = next(r for r in before.history if r["epoch"] == before.best_epoch)
    found = go_on(dataset, tmp_path / "new", tmp_path / "old", **changes)
    start = found.history[0]
    assert (start["epoch"], start["steps"], start["loss"]) == (0, 0, None)
    assert start["validation"] == best["validation"]
    assert [record["epoch"] for record in found.history] == [0, 1, 2]
    assert Run.open(tmp_path / "new").metrics()[0]["validation"] == best["validation"]
    assert found.start is not None
    assert found.start["optimizer"] == "carried over"
    assert (found.start["carried"], found.start["new"], found.start["unseen"]) == (12, 0, 0)


@pytest.mark.parametrize("name", BACKBONES)
def test_every_backbone_goes_on(
    name: str, dataset: PreparedDataset, grown: PreparedDataset, tmp_path: Path
) -> None:
    entry: Any = BACKBONES[name]
    make = entry.settings(dim=8, max_length=6).build
    before, same, after = make(12), make(12, seed=1), make(15, seed=1)
    was = go_on(dataset, tmp_path / "old", None, model=lambda _: before)
    best = next(r for r in was.history if r["epoch"] == was.best_epoch)
    again = go_on(dataset, None, tmp_path / "old", model=lambda _: same, epochs=1)
    assert again.history[0]["validation"] == best["validation"]
    go_on(grown, None, tmp_path / "old", model=lambda _: after, epochs=1, learning_rate=1e-30)
    with torch.no_grad():
        old, new = (
            one(torch.arange(n, n + 5)[None])[0, -1] for one, n in ((before, 2), (after, 3))
        )
        assert torch.equal(before.catalogue @ old, after.catalogue[1:13] @ new)


@pytest.mark.parametrize("changes", [{}, ROW_WISE], ids=["adam", "row-wise"])
def test_before_any_step_all_state_is_the_old_one(
    changes: dict[str, Any], dataset: PreparedDataset, tmp_path: Path
) -> None:
    go_on(dataset, tmp_path / "old", None, epochs=1, **changes)
    with pytest.raises(TrainingInterrupted):
        go_on(dataset, tmp_path / "new", tmp_path / "old", on_epoch=stop_at(0), **changes)
    old, _ = read_tensors(tmp_path / "old/resume.safetensors")
    new, metadata = read_tensors(tmp_path / "new/resume.safetensors")
    assert metadata["progress"]["current"]["step"] == 0
    assert any(name.startswith("optimizer.") for name in old)
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


def test_a_start_that_nothing_was_better_than_stays_the_best(
    dataset: PreparedDataset, old: Path, tmp_path: Path
) -> None:
    found = go_on(dataset, tmp_path / "new", old, learning_rate=0.9)
    assert found.best_epoch == 0
    weights, metadata = read_tensors(tmp_path / "new/best.safetensors")
    before, _ = read_tensors(old / "best.safetensors")
    assert metadata["epoch"] == 0
    assert all(torch.equal(weights[name], before[name]) for name in before)
    assert found.test == (Run.open(old).result() or {})["test"]
    assert found.validation == found.history[0]["validation"]


@pytest.mark.parametrize("changes", [{}, ROW_WISE], ids=["adam", "row-wise"])
def test_items_are_united_by_id(
    changes: dict[str, Any], dataset: PreparedDataset, grown: PreparedDataset, tmp_path: Path
) -> None:
    go_on(dataset, tmp_path / "old", None, **changes)
    with pytest.raises(TrainingInterrupted):
        go_on(grown, tmp_path / "new", tmp_path / "old", on_epoch=stop_at(0), **changes)
    run = Run.open(tmp_path / "new")
    start = run.config["start"]
    assert [start[n] for n in ("carried", "new", "from_neighbours", "unseen")] == [12, 3, 3, 2]
    told = "12 items carried over (2 of them without an event to train on), 3 new (3 from the mean"
    assert told in tell_start(start)
    assert run.item_ids.decode(range(15)) == [50, *range(100, 112), 1040, 2000]
    histories = [[102, 103, 104], [111], [105, 100, 103, 110]]
    before = Recommender.load(tmp_path / "old", "cpu")
    with pytest.warns(TrainingWarning, match="has not ended"):
        after = Recommender.load(tmp_path / "new", "cpu")
    ids = list(range(100, 112))
    for history in histories:
        scores = [
            _scores(one, one.item_ids.lookup(history), one.item_ids.lookup(ids))
            for one in (before, after)
        ]
        assert torch.equal(*scores)
    old_state, new_state = optimizer_state(tmp_path / "old"), optimizer_state(tmp_path / "new")
    name = "optimizer.sum.model.catalogue" if changes else "optimizer.exp_avg_sq.model.catalogue"
    assert torch.equal(new_state[name][1:13], old_state[name])
    assert not new_state[name][[0, 13, 14]].any()
    assert old_state.keys() == new_state.keys()


def _scores(one: Recommender, history: Any, items: Any) -> Tensor:
    model: Any = one.model
    with torch.no_grad():
        states = model(torch.from_numpy(history)[None])[:, -1]
    return rescore(states, model.catalogue.detach(), torch.from_numpy(items)[None])


@pytest.mark.parametrize("at", [0, 1])
def test_a_continued_run_is_resumed_to_the_bit_without_the_old_one(
    at: int, dataset: PreparedDataset, grown: PreparedDataset, tmp_path: Path
) -> None:
    go_on(dataset, tmp_path / "old", None, epochs=1)
    go_on(grown, tmp_path / "whole", tmp_path / "old")
    with pytest.raises(TrainingInterrupted):
        go_on(grown, tmp_path / "new", tmp_path / "old", on_epoch=stop_at(at))
    (tmp_path / "old").rename(tmp_path / "gone")
    go_on(grown, tmp_path / "new", None, resume=True)
    assert outcome(tmp_path / "new") == outcome(tmp_path / "whole")


def test_a_run_of_which_nothing_was_saved_begins_again(
    grown: PreparedDataset, old: Path, tmp_path: Path
) -> None:
    go_on(grown, tmp_path / "whole", old)
    go_on(grown, tmp_path / "new", old)
    for name in ("resume.safetensors", "best.safetensors", "result.json"):
        (tmp_path / "new" / name).unlink()
    go_on(grown, tmp_path / "new", old, resume=True)
    assert outcome(tmp_path / "new") == outcome(tmp_path / "whole")


def test_resuming_begins_where_the_run_began(
    dataset: PreparedDataset, old: Path, tmp_path: Path
) -> None:
    go_on(dataset, tmp_path / "plain", None, epochs=1)
    with pytest.raises(InputError, match="was begun with new weights, not from"):
        go_on(dataset, tmp_path / "plain", old, resume=True)
    go_on(dataset, tmp_path / "new", old, epochs=1)
    with pytest.raises(InputError, match=r"was begun from .*, not from"):
        go_on(dataset, tmp_path / "new", tmp_path / "plain", resume=True, epochs=2)


def test_without_the_checkpoint_the_optimizer_begins_anew_and_says_so(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    go_on(dataset, tmp_path / "old", None)
    (tmp_path / "old/resume.safetensors").unlink()
    found = go_on(dataset, None, tmp_path / "old")
    assert found.start is not None
    assert found.start["optimizer"] == "anew: resume.safetensors is not there"
    assert found.history[0]["validation"] is not None


def test_of_another_optimizer_the_items_state_is_not_taken(
    dataset: PreparedDataset, old: Path
) -> None:
    found = go_on(dataset, None, old, **ROW_WISE)
    assert found.start is not None
    assert "of the items anew" in found.start["optimizer"]


def test_the_model_is_that_of_the_run(dataset: PreparedDataset, old: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"dropout was 0\.0 and is now 0\.1"):
        go_on(dataset, tmp_path / "new", old, model=partial(small_model, dropout=0.1))
    assert not (tmp_path / "new").exists()
    with pytest.raises(InputError, match=r"is of the model sasrec, not .*\.Own"):
        go_on(dataset, None, old, model=Own.of)
    with pytest.raises(InputError, match="choose another directory"):
        go_on(dataset, old, old, force=True)


def test_a_table_without_rows_is_refused(
    dataset: PreparedDataset, old: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    shutil.copytree(old, empty)
    weights, metadata = read_tensors(empty / "best.safetensors")
    weights["catalogue"] = weights["catalogue"][:0]
    write_tensors(empty / "best.safetensors", weights, metadata)
    with pytest.raises(InputError, match=r"weights of another model: model\.catalogue"):
        go_on(dataset, None, empty)


class Own(torch.nn.Module):
    """Not of sce: its table has another name, and there may be a second one."""

    def __init__(self, n_items: int, biased: bool = False) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(n_items, 4)
        self.biases = torch.nn.Embedding(n_items if biased else 1, 4)

    @classmethod
    def of(cls, dataset: PreparedDataset, **options: Any) -> "Own":
        return cls(dataset.n_items, **options)

    @property
    def catalogue(self) -> Tensor:
        return self.items.weight

    def forward(self, histories: Tensor) -> Tensor:
        states: Tensor = self.items(histories.clamp(min=0)) + self.biases.weight[0]
        return states


def test_a_model_of_ones_own(
    dataset: PreparedDataset, grown: PreparedDataset, tmp_path: Path
) -> None:
    before, after = Own(12), Own(15)
    go_on(dataset, tmp_path / "old", None, model=lambda _: before)
    go_on(grown, None, tmp_path / "old", model=lambda _: after, learning_rate=1e-30)
    assert torch.equal(after.items.weight[1:13], before.items.weight)
    biased = partial(Own.of, biased=True)
    go_on(dataset, tmp_path / "biased", None, model=biased)
    go_on(dataset, None, tmp_path / "biased", model=biased)
    same_number = replace(dataset, item_ids=Vocabulary.from_integers(range(105, 117)))
    for other in (grown, same_number):
        with pytest.raises(InputError, match=r"model\.biases\.weight are missing or of another"):
            go_on(other, None, tmp_path / "biased", model=biased)


def test_a_dataset_that_lacks_items_of_the_run_is_refused(
    grown: PreparedDataset, old: Path, tmp_path: Path
) -> None:
    given: Any = {"settings": settings(epochs=1), "progress": False}
    with pytest.raises(InputError, match=r"has 2 items that the dataset lacks.*unite_items"):
        fit(small_model(grown), CrossEntropy(), grown, start_from=old, **given)
    out = tmp_path / "new"
    go_on(grown, out, old, epochs=1)
    with pytest.raises(InputError, match=r"has 15 items, also .* the dataset 13: .*unite_items"):
        fit(small_model(grown), CrossEntropy(), grown, out=out, resume=True, **given)
    found = Run.open(out).load_dataset()
    assert found.item_ids == unite_items(grown, old).item_ids == unite_items(grown, out).item_ids


def test_nothing_in_common_is_refused(grown: PreparedDataset, old: Path) -> None:
    ids = Vocabulary.from_strings(f"item {n:02}" for n in range(grown.n_items))
    with pytest.raises(InputError, match="none of the 13 items"):
        go_on(replace(grown, item_ids=ids), None, old)


@pytest.mark.parametrize("events", [3, 1 << 14])
def test_means_of_neighbours_are_those_of_a_naive_loop(
    events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sce.training.start._EVENTS", events)
    random = np.random.default_rng(0)
    sequences = [random.integers(0, 9, size=n).tolist() for n in (1, 7, 12, 4, 9)]
    sequences.append([9])  # new, and alone
    sources = np.array([2, -1, 0, -1, 1, 5, -1, 3, 4, -1])
    rows = torch.randn(6, 3)
    found, near = mean_neighbours(lay_out(sequences, range(6)), sources, rows, window=2)
    vectors: dict[int, list[Tensor]] = {item: [] for item in np.flatnonzero(sources < 0).tolist()}
    for sequence in sequences:
        for place, item in enumerate(sequence):
            for other in range(max(0, place - 2), min(len(sequence), place + 3)):
                if item in vectors and sources[sequence[other]] >= 0:
                    vectors[item].append(rows[sources[sequence[other]]].double())
    every = rows[[2, 0, 1, 5, 3, 4]].double()
    expected = [torch.stack(each).mean(0) if each else every.mean(0) for each in vectors.values()]
    torch.testing.assert_close(found, torch.stack(expected))
    assert near.tolist() == [bool(each) for each in vectors.values()]
    assert near.tolist()[-1] is False


def test_a_sharded_catalogue_goes_on_too(
    dataset: PreparedDataset, grown: PreparedDataset, tmp_path: Path
) -> None:
    sharded = ROW_WISE | {"shard_catalogue": True}
    before = go_on(dataset, tmp_path / "old", None, epochs=1, **sharded)
    found = go_on(dataset, tmp_path / "new", tmp_path / "old", epochs=1, **sharded)
    assert found.start is not None
    assert found.start["optimizer"] == "carried over"
    assert found.history[0]["validation"] == before.history[0]["validation"]
    with pytest.raises(TrainingInterrupted):
        go_on(grown, tmp_path / "grown", tmp_path / "old", on_epoch=stop_at(0), **sharded)
    for name in ("rows", "sum"):
        was, now = (read_whole(tmp_path / run / "resume", name)[0] for run in ("old", "grown"))
        assert was.any()
        assert torch.equal(now[1:13], was)
