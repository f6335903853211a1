"""What benchmarks/train_peers.py has of its own: a worker's contract, and scoring what it wrote."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import train_peers
import train_workers
from sce.data.prepared import PreparedDataset
from sce.data.vocabulary import Vocabulary
from sce.evaluation.evaluate import evaluate
from sce.models.sasrec import SASRec
from sce.recommend import Recommender
from tests.cycle_data import MODEL, make_cycle

K = 10


@pytest.fixture
def dataset(tmp_path: Path) -> PreparedDataset:
    return make_cycle(tmp_path / "data", items=40)


def test_recommendations_score_as_the_model_that_gave_them(dataset: PreparedDataset) -> None:
    model = SASRec(dataset.n_items, MODEL)
    histories = [dataset.test[row][:-1] for row in range(len(dataset.test))]
    codes = Vocabulary.from_integers(np.arange(dataset.n_items))
    found = Recommender(model, codes).recommend(histories, K)
    items = np.array([one.items for one in found])
    expected = evaluate(model, dataset, split="test", ks=[1, 5, K])
    assert train_peers.score(items, dataset) == pytest.approx(expected.values)


def test_a_target_at_the_first_rank_is_a_hit_and_nothing_is_none(dataset: PreparedDataset) -> None:
    nothing = np.full((len(dataset.test), K), -1)
    missed = train_peers.score(nothing, dataset)
    assert missed["hr@10"] == missed["cov@10"] == 0
    nothing[:, 0] = dataset.test.items[dataset.test.offsets[1:] - 1]
    assert train_peers.score(nothing, dataset)["ndcg@1"] == 1


def do(job: dict[str, Any], dataset: PreparedDataset, out: Path) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "library": "sce",
        "data": str(dataset.path),
        "out": str(out),
        "k": K,
        "seed": 0,
    }
    usual |= {"negatives": 4, "shared": "sequence", "steps": None, "warm_up": 1, "epochs": 10}
    usual |= {"dim": 8, "blocks": 1, "length": 6, "dropout": 0.1, "lr": 1e-3, "batch": 16}
    usual |= {"device": "cpu", "precision": "float32", "seconds": 60, "loss": "ce", "ligr": False}
    told: dict[str, Any] = train_workers.work(SimpleNamespace(**usual | job))
    assert told["peak MiB in all"] >= told["peak MiB"] > 0
    return told


@pytest.mark.filterwarnings("ignore")  # of what a tiny dataset is too small for
@pytest.mark.parametrize(
    "job", [{"loss": "ce"}, {"loss": "ce-"}, {"loss": "sce"}, {"ligr": True}], ids=str
)
def test_sce_makes_the_steps_that_were_asked_for(
    dataset: PreparedDataset, job: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "items.npy"
    told = do({**job, "steps": 3}, dataset, out)
    assert len(told["begun"]) == 1 + 3 + 1
    items = np.load(out)
    assert items.shape == (len(dataset.test), K)
    for row in range(len(items)):
        assert not set(items[row]) & set(dataset.test[row][:-1])


@pytest.mark.filterwarnings("ignore")
def test_whole_epochs_have_a_mark_before_the_first_and_after_each(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    told = do({"epochs": 3}, dataset, tmp_path / "items.npy")
    assert len(told["marks"]) == 1 + 3
    assert sorted(told["marks"]) == told["marks"]
    assert told["begun"] == []


OPTIONS: dict[str, Any] = {"epochs": 2, "steps": 0, "rounds": 1, "together": False, "seed": 0}
OPTIONS |= {"warm_up": 0, "length": 6, "negatives": 4, "shared": "sequence", "dropout": 0.1}
OPTIONS |= {"batch": [16], "precision": ["float32", "bf16"], "losses": ["ce", "ce-"]}
OPTIONS |= {"device": "cpu", "seconds": 60, "until": 60, "limit": 60, "blocks": 1, "ligr": False}


def test_cells_are_those_that_the_libraries_have(dataset: PreparedDataset) -> None:
    cells = train_peers.cells_of(Namespace(**OPTIONS), {"sce": "python", "recbole": "python"})
    assert [cell[1:] for cell in cells] == [
        ("float32", "ce", "sce"),
        ("float32", "ce", "recbole"),
        ("float32", "ce-", "sce"),
        ("bf16", "ce", "sce"),
        ("bf16", "ce-", "sce"),
    ]
    with_ligr = train_peers.cells_of(Namespace(**OPTIONS | {"ligr": True}), {"recbole": "python"})
    assert with_ligr == []


def test_a_library_that_fails_stops_no_other(dataset: PreparedDataset, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("#!/bin/sh\necho no such library >&2\nexit 3\n")
    good = tmp_path / "good"
    told: dict[str, Any] = {
        "begun": [],
        "marks": [0.0, 9.0, 10.0],
        "recommend s": 1.0,
        "peak MiB": 7.0,
    }
    save = f"numpy.save(json.loads(sys.argv[4])['out'], numpy.full(({len(dataset.test)}, {K}), -1))"
    lines = ["import json, sys, numpy", "print('ready', flush=True)", "input()", save]
    script = "\n".join([f"#!{sys.executable}", *lines, f"print({json.dumps(told)!r})"])
    good.write_text(script + "\n")
    for file in (bad, good):
        file.chmod(0o755)
    cells = [train_peers.Cell(16, "float32", "ce", library) for library in ("rectools", "replay")]
    pythons = {"rectools": str(bad), "replay": str(good)}
    options = Namespace(**OPTIONS)
    *_, found = train_peers.measure_all(cells, pythons, dataset, options)
    rows = [train_peers.summary(cell, found[cell], dataset, options) for cell in cells]
    assert rows[0]["failed"] == "code 3: no such library"
    assert (rows[1]["epoch s"], rows[1]["epochs trained"], rows[1]["hr@10"]) == (1, 2, 0)
