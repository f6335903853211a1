import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
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


def last_but_for_one(rank: int, directory: Path, end: Callable[[], None], seconds: float) -> None:
    with start_ranks(timeout=seconds, device="cpu") as ranks:
        ranks.gather_counts(1)
        if rank == 1:
            end()
            os._exit(1)
        try:
            ranks.gather_counts(2)
        except RankError as error:
            (directory / str(rank)).write_text(str(error))


@pytest.mark.parametrize(
    ("end", "seconds", "said"),
    [
        (be_killed, 60.0, "no answer from rank 1: killed, stuck, or cut off"),
        (fail, 60.0, "rank 1 ended: the batch is empty"),
        (get_stuck, 2.0, "no answer from rank 1: killed, stuck, or cut off"),
    ],
)
def test_the_others_say_which_rank_is_missing(
    end: Callable[[], None], seconds: float, said: str, tmp_path: Path
) -> None:
    codes = run_launched(3, last_but_for_one, tmp_path, end, seconds)
    assert codes[0] == codes[2] == 0
    assert codes[1]
    for rank in (0, 2):
        assert (tmp_path / str(rank)).read_text().startswith(said)


RESTARTED = """
import os, signal, sys, time
from pathlib import Path
from sce.distributed import start_ranks

attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "1" and os.environ["RANK"] == "1":
    time.sleep(1)  # the other one must not meet its predecessor
with start_ranks(timeout=20, device="cpu") as ranks:
    ranks.gather_counts(1)
    if attempt == "0" and ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    Path(sys.argv[1], str(ranks.rank)).write_text(str(ranks.gather_counts(ranks.rank)))
"""


def test_a_killed_rank_comes_back_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node=2", "--max-restarts=1", str(script), str(tmp_path)]
    source = str(ROOT / "src")
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    done = subprocess.run(launch, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["[[0], [1]]"] * 2


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
