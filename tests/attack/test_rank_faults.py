"""Ranks that are killed, stopped, slow, or have no space: nothing is lost, nothing hangs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from sce.distributed.checkpoint import save_sharded
from sce.training.run import Run
from tests.attack.elastic import Act, Fault, Outcome, launch
from tests.attack.faulty import sample
from tests.attack.test_kills import tell
from tests.cycle_data import make_cycle
from tests.training.outcomes import outcome, read_state

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo"),
]

TRAIN = ["train", "data", "--out", "run", "--epochs", "2", "--batch-size", "6", "--device", "cpu"]
TRAIN += ["--model.dim", "8", "--model.blocks", "1", "--model.max-length", "6"]
TRAIN += ["--loss", "sce", "--loss.bucket-size-y", "6", "--training.row-wise"]
TRAIN += ["--training.save-minutes", "0"]  # as often as it may
MANY = "SCE_ATTACK" in os.environ


class Undisturbed(NamedTuple):
    """A directory with a dataset, and what an undisturbed run comes to."""

    place: Path
    command: list[str]
    moments: list[int]  # of each rank
    final: dict[str, Any]

    @property
    def sharded(self) -> bool:
        return "shard" in self.command[-1]

    def launch(self, *more: str, fault: Fault | None = None, **options: Any) -> Outcome:
        """Train in the directory."""
        given = {"before": small_parts, **options}
        return launch(self.place, [*self.command, *more], fault, **given)

    def clear(self) -> None:
        shutil.rmtree(self.place / "run", ignore_errors=True)


def small_parts() -> None:
    """Let all ranks have parts of a sharded table to write."""
    function: Any = save_sharded
    function.__wrapped__.__kwdefaults__["part_items"] = 7


@pytest.fixture(scope="module", params=["replicated", "sharded"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    place, sharded = tmp_path_factory.mktemp("ranks"), request.param == "sharded"
    make_cycle(place / "data", items=30)
    command = [*TRAIN, "--training.shard-catalogue"] if sharded else TRAIN
    found = launch(place, command, before=small_parts)
    assert found.well, found
    shutil.copytree(place / "run", place / "ended")
    return Undisturbed(place, command, found.moments, outcome(place / "run"))


@pytest.fixture
def undisturbed(whole: Undisturbed, request: pytest.FixtureRequest) -> Undisturbed:
    if whole.sharded and not MANY and "is_killed" not in request.node.name:
        pytest.skip("SCE_ATTACK=1 does it with shards as well")
    whole.clear()
    return whole


def is_whole(run: Path) -> None:
    """What is there can be read, every byte as it was written."""
    if run.exists():
        found = Run.open(run)
        for file in (found.best_weights, found.resume_state):
            if file.exists():
                read_state(file)


def goes_on(undisturbed: Undisturbed) -> None:
    """The same command, with --resume if anything is there, comes to the same bits."""
    place = undisturbed.place
    is_whole(place / "run")
    again = undisturbed.launch(*["--resume"] if (place / "run").exists() else [])
    assert again.well, again
    assert outcome(place / "run") == undisturbed.final
    assert not [*(place / "run").rglob(".*"), *place.glob(".run*")]


def moments_of(count: list[int], default: int) -> list[tuple[int, int]]:
    """Moments of all ranks to attack at: rank and number."""
    every = [(rank, when + 1) for rank, n in enumerate(count) for when in range(n)]
    return [every[number - 1] for number in sample(len(every), default)]


def test_a_rank_is_killed(undisturbed: Undisturbed, capsys: pytest.CaptureFixture[str]) -> None:
    count = undisturbed.moments
    cases, sentences, longest = 0, 0, 0.0
    for rank, when in moments_of(count, 1 if undisturbed.sharded else 2):
        undisturbed.clear()
        found = undisturbed.launch(fault=Fault(rank, when))
        if found.well and found.moments[rank] < when:  # fewer this time: how often it saves varies
            continue
        cases += 1
        assert not found.well, (rank, when)
        assert f"rank      : {rank} (" in found.launcher, (rank, when, found)
        said = found.said[1 - rank]
        sentence = f"sce: error: no answer from rank {rank}: killed, stopped, or cut off; "
        # Before and after training the launcher's signal ends the other one, and it tells.
        assert sentence in said or "error" not in said, (rank, when, found)
        sentences += sentence in said
        longest = max(longest, found.seconds)
        goes_on(undisturbed)
    assert sentences or not MANY
    what = (
        f"a rank of training killed, {sentences} noticed by the other, all over in {longest:.1f} s"
    )
    tell(capsys, what, cases)


def test_a_rank_has_no_space(undisturbed: Undisturbed, capsys: pytest.CaptureFixture[str]) -> None:
    count = undisturbed.moments
    faults = [Fault(0, when, "fill") for _, when in moments_of(count[:1], 1)]
    faults += [Fault(0, 2000, "limit"), Fault(1, 1, "fill")][: None if MANY else 0]
    for fault in faults:
        undisturbed.clear()
        found = undisturbed.launch(fault=fault)
        if not found.well:
            assert fault.rank == 0 or undisturbed.sharded, found
            reason = "no space left on the disk" if fault.act == "fill" else "File too large"
            assert reason in found.said[fault.rank], (fault, found)
            told = rf"sce: error: rank {fault.rank}( ended)?: cannot write "
            said = found.said[1 - fault.rank]
            assert re.search(told, said) or not said, (fault, found)
        goes_on(undisturbed)
    tell(capsys, "a rank of training without space", len(faults))


def test_a_slow_rank(undisturbed: Undisturbed, capsys: pytest.CaptureFixture[str]) -> None:
    count = undisturbed.moments
    middle = count[1] // 2
    assert undisturbed.launch(fault=Fault(1, middle, "sleep", seconds=2)).well
    assert outcome(undisturbed.place / "run") == undisturbed.final
    sentences: dict[Act, str] = {
        "sleep": "rank 1 is alive, but did not come within 1.5 s: slow, or stuck; ",
        "stop": "no answer from rank 1: killed, stopped, or cut off; ",
    }
    if not MANY:  # after a stopped one torchrun waits for half a minute
        sentences.clear()
    for act, sentence in sentences.items():
        undisturbed.clear()
        found = undisturbed.launch(fault=Fault(1, middle, act, seconds=4), timeout=1.5)
        assert not found.well
        assert f"sce: error: {sentence}" in found.said[0], found
        goes_on(undisturbed)
    tell(capsys, "a rank of training slow or stopped", 1 + len(sentences))


def test_a_killed_rank_comes_back(
    undisturbed: Undisturbed, capsys: pytest.CaptureFixture[str]
) -> None:
    count = undisturbed.moments
    chosen, run = moments_of(count, 1), undisturbed.place / "run"
    for number, (rank, when) in enumerate(chosen):
        undisturbed.clear()
        replaces = number % 2 == 0  # a run that was there before, once
        if replaces:
            shutil.copytree(undisturbed.place / "ended", run)
        before = run.stat().st_ino if replaces else 0
        flags, fault = ["--force"] * replaces, Fault(rank, when, attempts=2)
        found = undisturbed.launch(*flags, fault=fault, restarts=2, timeout=10)
        assert found.well, (rank, when, found)
        assert run.stat().st_ino != before, (rank, when)
        assert outcome(undisturbed.place / "run") == undisturbed.final, (rank, when)
    tell(capsys, "a rank of training killed twice, started again", len(chosen))


SITE = """
import os
from pathlib import Path
if "RANK" in os.environ:
    from tests.attack.elastic import Fault, hurt
    hurt(Path.cwd(), Fault(1, int(os.environ["WHEN"]), attempts=2))
"""


@pytest.mark.skipif(not MANY, reason="imports torch a dozen times; SCE_ATTACK=1 does it")
@pytest.mark.parametrize("restarts", [0, 2])
def test_under_torchrun_itself(restarts: int, undisturbed: Undisturbed) -> None:
    place, train, count, expected = undisturbed
    site, root = place / "site", Path(__file__).parents[2]
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)  # Python imports it when it starts
    paths = [str(path) for path in (site, root / "src", root)]
    env = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={restarts}", "-m", "sce", *train]
    env["WHEN"] = str(count[1] // 3)  # early enough that the second attempt comes to it as well
    done = subprocess.run(
        command, cwd=place, env=os.environ | env, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode == 0) is (restarts == 2), done.stderr
    told = "sce: error: no answer from rank 1: killed, stopped, or cut off; "
    assert done.stderr.count(told) == (2 if restarts else 1), done.stderr
    if restarts:
        assert outcome(place / "run") == expected
    else:
        goes_on(undisturbed)
