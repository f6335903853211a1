import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sce.errors import InputError
from sce.training.begin import start_run
from sce.training.journal import Journal, check_tensorboard
from sce.training.run import Run
from tests.cycle_data import make_cycle

CONFIG: dict[str, Any] = {"model": {}, "loss": {}, "training": {}}


def record(epoch: int, **changes: Any) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "loss": 1.5,
        "tokens_per_second": 10.0,
        "seconds": {"training": 1.0, "evaluation": 0.5},
        "memory_mib": {"training": 100.0, "evaluation": None},
        "validation": {"ndcg@10": 0.25},
        "buckets": None,
    } | changes


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return start_run(tmp_path / "run", make_cycle(tmp_path / "data"), config=CONFIG, derived={})


def test_each_record_is_a_line_at_once(run: Run) -> None:
    journal = Journal(run, [record(1)], tensorboard=False)
    assert run.metrics() == [record(1)]
    journal.write(record(2))
    assert run.metrics() == [record(1), record(2)]
    journal.close()


class FakeWriter:
    """Remembers what it was given."""

    made: "list[FakeWriter]"

    def __init__(self, directory: str, purge_step: int) -> None:
        self.directory, self.purge_step, self.closed = directory, purge_step, False
        self.scalars: dict[tuple[str, int], float] = {}
        self.made.append(self)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag, step] = value

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def test_tensorboard_is_given_every_number(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeWriter.made = []
    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    journal = Journal(run, [record(1)], tensorboard=True)
    journal.write(record(2))
    journal.close()
    (writer,) = FakeWriter.made
    assert writer.directory == str(run.path / "tensorboard")
    assert writer.purge_step == 2  # what a crash left beyond the state is forgotten
    assert writer.closed
    assert writer.scalars == {
        ("loss", 2): 1.5,
        ("tokens_per_second", 2): 10.0,
        ("validation/ndcg@10", 2): 0.25,
        ("seconds/training", 2): 1.0,
        ("seconds/evaluation", 2): 0.5,
        ("memory_mib/training", 2): 100.0,
    }


def test_without_tensorboard_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match="not installed; install it with: pip install"):
        check_tensorboard()
