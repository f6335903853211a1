"""What benchmarks/train_peers.py has of its own: a worker's contract, and scoring what it wrote."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sce.data.prepared import PreparedDataset
from sce.data.vocabulary import Vocabulary
from sce.evaluation.evaluate import evaluate
from sce.models.sasrec import SASRec
from sce.recommend import Recommender
from tests.cycle_data import MODEL, make_cycle

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
K = 10


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedDataset:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return make_cycle(tmp_path / "data", items=40)


def test_recommendations_score_as_the_model_that_gave_them(dataset: PreparedDataset) -> None:
    driver: Any = importlib.import_module("train_peers")
    model = SASRec(dataset.n_items, MODEL)
    histories = [dataset.test[row][:-1] for row in range(len(dataset.test))]
    codes = Vocabulary.from_integers(np.arange(dataset.n_items))
    found = Recommender(model, codes).recommend(histories, K)
    items = np.array([one.items for one in found])
    expected = evaluate(model, dataset, split="test", ks=[1, 5, K])
    assert driver.score(items, dataset) == pytest.approx(expected.values)


def test_a_target_at_the_first_rank_is_a_hit_and_nothing_is_none(dataset: PreparedDataset) -> None:
    driver: Any = importlib.import_module("train_peers")
    nothing = np.full((len(dataset.test), K), -1)
    missed = driver.score(nothing, dataset)
    assert missed["hr@10"] == missed["cov@10"] == 0
    nothing[:, 0] = dataset.test.items[dataset.test.offsets[1:] - 1]
    assert driver.score(nothing, dataset)["ndcg@1"] == 1


@pytest.mark.filterwarnings("ignore")  # of what a tiny dataset is too small for
@pytest.mark.parametrize("loss", ["ce", "ce-", "sce"])
def test_sce_makes_the_steps_that_were_asked_for(
    dataset: PreparedDataset, loss: str, tmp_path: Path
) -> None:
    workers: Any = importlib.import_module("train_workers")
    out = tmp_path / "items.npy"
    job = {"library": "sce", "data": str(dataset.path), "loss": loss, "out": str(out), "k": K}
    job |= {"negatives": 4, "shared": "sequence", "steps": 3, "warm_up": 1, "epochs": 10}
    job |= {"dim": 8, "blocks": 1, "length": 6, "dropout": 0.1, "lr": 1e-3, "batch": 16, "seed": 0}
    told = workers.work(SimpleNamespace(**job))
    assert len(told["begun"]) == 1 + 3 + 1
    assert told["peak MiB in all"] >= told["peak MiB"] > 0
    items = np.load(out)
    assert items.shape == (len(dataset.test), K)
    for row in range(len(items)):
        assert not set(items[row]) & set(dataset.test[row][:-1])
