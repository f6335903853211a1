from pathlib import Path

import pytest

from sce.data.vocabulary import Vocabulary
from sce.report.record import Record, number
from sce.training.run import Run
from tests.tiny_run import make_dataset, make_run, write_epochs, write_result


@pytest.fixture
def run(tmp_path: Path) -> Run:
    items, users = Vocabulary.from_integers(range(40)), Vocabulary.from_integers(range(9))
    return make_run(tmp_path / "run", make_dataset(tmp_path / "data", items, users))


def test_a_finished_run(run: Run) -> None:
    write_epochs(run)
    write_result(run)
    record = Record.read(run)
    assert (record.name, record.model, record.loss_name) == ("run", "SASRec", "SCE")
    assert record.best_epoch == 3
    assert record.metric("test", "ndcg@10") == pytest.approx(0.1423)
    assert record.metric("test", "ndcg@10", of="popularity") == pytest.approx(0.0459)
    assert record.metric("validation", "ndcg@10") == pytest.approx(0.06)
    assert record.column("seconds", "training") == [7.5] * 4
    assert record.numbers_of_epochs == [1, 2, 3, 4]


def test_a_run_under_way(run: Run) -> None:
    write_epochs(run)
    record = Record.read(run)
    assert record.best_epoch == 3
    assert record.metric("validation", "ndcg@10") == pytest.approx(0.06)
    assert record.metric("test", "ndcg@10") is None
    assert record.metric("validation", "ndcg@10", of="popularity") is None


def test_a_run_that_has_just_begun(run: Run) -> None:
    record = Record.read(run)
    assert (record.best_epoch, record.epochs, record.result) == (None, [], None)
    assert record.metric("validation", "ndcg@10") is None


@pytest.mark.parametrize("evaluated", [None, {}])
def test_epochs_without_an_evaluation(run: Run, evaluated: object) -> None:
    write_epochs(run, validation=evaluated, best=False, buckets=None)
    record = Record.read(run)
    assert record.column("validation", "ndcg@10") == [None] * 4
    assert record.column("buckets", "picked_once") == [None] * 4
    assert record.best_epoch is None


@pytest.mark.parametrize("wrong", [None, "x", [], True])
def test_epochs_without_a_number_are_counted(run: Run, wrong: object) -> None:
    write_epochs(run, epoch=wrong)
    assert Record.read(run).numbers_of_epochs == [1, 2, 3, 4]


def test_numbers_deep_in_a_record() -> None:
    record = {"a": {"b": 1.5, "c": "1", "d": True, "e": float("nan")}, "f": None}
    assert number(record, "a", "b") == 1.5
    for keys in [("a", "c"), ("a", "d"), ("a", "e"), ("f", "b"), ("x",), ("a", "b", "c")]:
        assert number(record, *keys) is None
