import os
import runpy
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from sce.distributed import RankError, Ranks, start_ranks
from sce.errors import InputError
from tests.distributed.pool import Run, run_launched

ROOT = Path(__file__).parents[2]


def test_alone_there_is_one_rank() -> None:
    with start_ranks(device="cpu") as ranks:
        assert (ranks.rank, ranks.size) == (0, 1)
        assert ranks.gather_json({"a": 1}) == [{"a": 1}]


def elsewhere(ranks: Ranks) -> str:
    with pytest.raises(InputError) as refusal:
        Ranks(ranks.group, "meta")
    return str(refusal.value)


def test_a_device_that_the_group_does_not_serve_is_refused(on_ranks: Run) -> None:
    said = "the process group has no backend for meta, but cpu:gloo,cuda:gloo; name another"
    assert all(each.startswith(said) for each in on_ranks(2, elsewhere))


def summed(ranks: Ranks) -> list[float]:
    layer = nn.Linear(2, 1)
    for weight in layer.parameters():
        weight.grad = torch.full_like(weight, 10.0**ranks.rank)
    if ranks.rank:
        layer.bias.grad = None  # as on a rank that does not use it
    ranks.sum_gradients(layer.parameters())
    return [*layer.weight.grad.flatten().tolist(), *layer.bias.grad.tolist()]  # type: ignore[union-attr]


def test_gradients_are_summed_where_some_have_none(on_ranks: Run) -> None:
    assert on_ranks(1, summed) == [[1.0, 1.0, 1.0]]
    assert on_ranks(3, summed) == [[111.0, 111.0, 1.0]] * 3


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise InputError("the batch is empty")


def get_stuck() -> None:
    time.sleep(5)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def outlast_one(rank: int, directory: Path, end: Callable[[], None], seconds: float) -> None:
    """Rank 1 comes to an end, and meanwhile rank 2 is busy for longer than the others ask."""
    with start_ranks(timeout=seconds, device="cpu") as ranks:
        pids = [pid for (pid,) in ranks.gather_counts(os.getpid())]
        if rank == 1:
            end()
        if rank == 2:
            time.sleep(1.5)
        try:
            ranks.gather_counts(2)
        except RankError as error:
            (directory / str(rank)).write_text(str(error))
        if rank == 0:
            with suppress(ProcessLookupError):
                os.kill(pids[1], signal.SIGCONT)


@pytest.mark.parametrize(
    ("end", "seconds", "said"),
    [
        (be_killed, 60.0, "no answer from rank 1: killed, stopped, or cut off"),
        (fail, 60.0, "rank 1 ended: the batch is empty"),
        (stop, 2.0, "no answer from rank 1: killed, stopped, or cut off"),
        (get_stuck, 2.0, "rank 1 is alive, but did not come within 2 s: slow, or stuck; "),
    ],
)
def test_all_say_which_rank_is_missing(
    end: Callable[[], None], seconds: float, said: str, tmp_path: Path
) -> None:
    codes = run_launched(3, outlast_one, tmp_path, end, seconds)
    assert codes[0] == codes[2] == 0
    comes_back = end in (stop, get_stuck)  # too late
    assert (codes[1] == 0) is comes_back
    for rank in (0, 1, 2) if comes_back else (0, 2):
        assert (tmp_path / str(rank)).read_text().startswith(said)


def be_slow(rank: int, directory: Path) -> None:
    os.environ["SCE_RANK_TIMEOUT"] = "20"
    with start_ranks(device="cpu") as ranks:
        pids = [pid for (pid,) in ranks.gather_counts(os.getpid())]
        if rank == 1:
            stop()
        else:
            time.sleep(1)
            os.kill(pids[1], signal.SIGCONT)
        (directory / str(rank)).write_text(str(ranks.gather_counts(rank)))


def test_a_rank_that_stops_for_a_while_is_waited_for(tmp_path: Path) -> None:
    assert run_launched(2, be_slow, tmp_path) == [0, 0]
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["[[0], [1]]"] * 2


def begin(rank: int, directory: Path) -> None:
    if rank == 1:
        be_killed()
    try:
        with start_ranks(timeout=1, device="cpu"):
            pass
    except RankError as error:
        (directory / str(rank)).write_text(str(error))


@pytest.mark.parametrize("held", [False, True], ids=["rank 0", "launcher"])
def test_a_rank_that_does_not_start_is_named(tmp_path: Path, held: bool) -> None:
    assert run_launched(2, begin, tmp_path, held=held) == [0, -signal.SIGKILL]
    assert (tmp_path / "0").read_text() == "rank 1 did not start within 1 s"


@pytest.mark.parametrize("text", ["soon", "0", "inf"])
def test_a_timeout_is_a_number_of_seconds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "SCE_RANK_TIMEOUT": text}.items():
        monkeypatch.setenv(name, value)
    complaint = f"SCE_RANK_TIMEOUT is a number of seconds; got '{text}'"
    with pytest.raises(InputError, match=complaint), start_ranks(device="cpu"):
        pass


def example(rank: int, directory: Path) -> None:
    with (directory / str(rank)).open("w") as file, redirect_stdout(file):
        runpy.run_path(str(ROOT / "examples" / "sharded_loop.py"))


def test_the_example_learns(tmp_path: Path) -> None:
    assert run_launched(2, example, tmp_path) == [0, 0]
    said = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    for rank, line in enumerate(said):
        assert line.startswith(f"rank {rank} of 2: loss ")
        assert float(line.split()[-1]) > 0.9
    assert said[0].split()[5] == said[1].split()[5]  # one loss of both
