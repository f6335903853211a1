"""Arguments of a wrong type: one sentence that names the argument, its value, what is allowed."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import sce
from sce.data.synthetic import SyntheticSettings
from sce.data.vocabulary import Vocabulary
from sce.errors import checked
from sce.losses.negatives import Draw

WHOLE = "must be a whole number of 64 bits"
LOG = pl.DataFrame({"user": [1, 1, 1], "item": ["a", "b", "c"], "time": [1, 2, 3]})
MODEL = sce.SASRec(3, dim=8, max_length=4)
RECOMMENDER = sce.Recommender(MODEL, Vocabulary.from_strings("abc"))
recommend, stream = RECOMMENDER.recommend, RECOMMENDER.stream_users


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> sce.PreparedDataset:
    return sce.prepare(LOG, tmp_path_factory.mktemp("data") / "d", split="leave-one-out")


def prepare(**options: Any) -> object:
    return sce.prepare(LOG, **({"out": "never"} | options))


def split(**options: Any) -> object:
    return sce.split_temporal(sce.read_interactions(LOG), **options)


@pytest.mark.parametrize(
    ("call", "argument", "value", "allowed"),
    [
        (recommend, "k", 2.5, WHOLE),
        (recommend, "k", 10**400, f"{WHOLE}; got 1000"),
        (recommend, "batch_size", 1.5, WHOLE),
        (recommend, "keep_seen", "no", "must be True or False"),
        (recommend, "histories", None, "must be a list; got None"),
        (stream, "dataset", None, "must be PreparedDataset"),
        (stream, "users", 5, "must be a list or None"),
        (sce.Recommender.load, "run", 5, "must be Run or a path or text; got 5"),
        (sce.Recommender, "model", None, "must be Ranker"),
        (prepare, "out", None, "must be a path or text"),
        (prepare, "min_item_users", "5", f"{WHOLE} or None; got '5'"),
        (prepare, "quantile", "x", "must be a number or None; got 'x'"),
        (prepare, "seed", 1.5, WHOLE),
        (prepare, "iterate", 1, "must be True or False"),
        (prepare, "report", True, "must be a function"),
        (sce.PreparedDataset.load, "path", 5, "must be a path or text"),
        (split, "quantile", True, "must be a number; got True"),
        (sce.keep_active, "min_user_items", 2.5, WHOLE),
        (sce.evaluate, "batch_size", 1.5, WHOLE),
        (sce.evaluate, "ks", [2.5], "must be a list of whole numbers or None"),
        (sce.evaluate, "ks", 5, "must be a list of whole numbers or None"),
        (sce.evaluate, "model", RECOMMENDER, "must be Ranker, a model to evaluate: histories"),
        (sce.evaluate, "dataset", "data/x", "must be Evaluated, a prepared dataset, opened, or"),
        (sce.fit, "resume", "no", "must be True or False"),
        (sce.fit, "settings", [], "are TrainingSettings"),
        (sce.fit, "loss", sce.CrossEntropy, "is a function of states, catalogue and targets"),
        (sce.SASRec, "n_items", 2.5, WHOLE),
        (sce.SASRec, "dim", 64.0, WHOLE),
        (sce.SASRec, "settings", 64, "must be SASRecSettings or None"),
        (sce.SASRec, "dropout", None, "must be a number"),
        (sce.RowwiseAdagrad, "lr", "x", "must be a number or Tensor"),
        (sce.TrainingSettings, "seed", 1.5, WHOLE),
        (sce.TrainingSettings, "epochs", True, WHOLE),
        (sce.TrainingSettings, "learning_rate", 10**400, "must be a number"),
        (sce.TrainingSettings, "betas", (0.9,), "must be 2 numbers"),
        (SyntheticSettings, "seed", 1.5, WHOLE),
    ],
)
def test_a_wrong_type_is_named(
    call: Callable[..., Any], argument: str, value: Any, allowed: str, dataset: sce.PreparedDataset
) -> None:
    usual: dict[Any, dict[str, Any]] = {
        recommend: {"histories": [["a"]]},
        stream: {"dataset": dataset},
        sce.Recommender: {"item_ids": RECOMMENDER.item_ids},
        sce.keep_active: {"interactions": sce.read_interactions(LOG)},
        sce.evaluate: {"model": MODEL, "dataset": dataset},
        sce.fit: {"model": MODEL, "loss": sce.CrossEntropy(), "dataset": dataset},
        sce.SASRec: {"n_items": 3},
        sce.RowwiseAdagrad: {"params": [MODEL.catalogue]},
    }
    with pytest.raises(sce.InputError, match=re.escape(f"{argument} {allowed}")):
        call(**usual.get(call, {}) | {argument: value})


def test_numbers_of_numpy_are_numbers() -> None:
    number: Any = np.int64(3)
    assert type(checked(_same)(number)) is int
    given: Any = {"epochs": number, "learning_rate": np.float32(0.5), "betas": (np.float32(0.5), 0)}
    settings = sce.TrainingSettings(**given)
    assert json.loads(json.dumps(asdict(settings)))["betas"] == [0.5, 0]
    model: Any = {"dim": np.int8(4), "dropout": np.float16(0.5)}
    assert json.dumps(asdict(sce.SASRecSettings(**model)))


def _same(number: int) -> int:
    return number


def test_a_history_has_an_order() -> None:
    with pytest.raises(sce.InputError, match=r"must be a list of ids; got \{'a'\}"):
        recommend([{"a"}], k=1)


def test_an_integer_that_python_does_not_write_is_no_text() -> None:
    with pytest.raises(sce.InputError, match="integer of thousands of digits; give it as text"):
        recommend([[10**5000]], k=1)


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("value", [True, "x", [], float("nan"), -1, 0, 10**400])
def test_a_loss_takes_numbers(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
        sce.ScalableCrossEntropy(**{name: value})


@pytest.mark.parametrize("value", [True, 2.5, 0, 10**400, torch.tensor(3)])
def test_a_size_is_a_whole_number(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="chunk_size must be"):
        sce.CrossEntropy(chunk_size=value)


ITEMS = torch.zeros(1, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        (None, r"must return Draw\(items, log_expected\), got NoneType"),
        (Draw([[1, 2]], None), "items of a sampler must be a tensor, got list"),  # type: ignore[arg-type]
        (Draw(ITEMS.float(), None), "items as integers, got torch.float32"),
        (Draw(ITEMS[0], None), r"1 rows must return items \[1, k\], got shape \(2,\)"),
        (Draw(ITEMS + 5, None), "items from 0 to 4, got 5"),
        (Draw(ITEMS - 1, None), "items from 0 to 4, got -1"),
        (Draw(ITEMS, ITEMS.float()), "no log_expected, as its attribute `correct` is False"),
    ],
)
def test_what_a_sampler_of_the_users_own_draws_is_checked(drawn: Any, message: str) -> None:
    class Own:
        correct = False

        def __call__(self, *_: Any, **__: Any) -> Any:
            return drawn

    loss = sce.SampledCrossEntropy(2, negatives=Own(), shared="batch")
    with pytest.raises((TypeError, ValueError), match=message):
        loss(torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2]))


def test_histories_without_a_known_item_are_counted_once() -> None:
    with pytest.warns(UserWarning, match="for 2 of 3 users: none of their items is in") as warned:
        found = recommend([["nope"], ["a"], ["x", "y"]], k=1)
    assert [len(one) for one in found] == [0, 1, 0]
    assert len(warned) == 1
    assert Path(warned[0].filename) == Path(__file__)
