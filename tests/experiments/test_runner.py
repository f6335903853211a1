"""The sweep with runs that only pretend: a script instead of training, which takes no time."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sce
from sce.data.storage import locked
from sce.errors import InputError
from sce.experiments import runner
from sce.experiments.datasets import Dataset
from sce.experiments.runner import SweepDisplay, SweepRunner
from sce.experiments.spec import PlannedRun, load_sweep, make_plan
from sce.experiments.store import Row, SweepDirectory, read_rows
from tests.cycle_data import make_cycle
from tests.experiments.pretended import RESULT

pytestmark = pytest.mark.timeout(60)

# Tells its starts and ends into a file; saves when it is told to stop, and goes on from there.
PRETENDER = (
    f"RESULT = {RESULT!r}"
    + """
import signal, sys, time
from pathlib import Path
directory, how, diary = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
def tell(what):
    with diary.open("a") as file: file.write(f"{what} {directory.name}\\n")
def save(*_):
    time.sleep(1.0)
    tell("saved"); (directory / "half").touch()
    (directory / "resume.safetensors").write_bytes(b"state"); sys.exit(143)
signal.signal(signal.SIGTERM, save)
directory.mkdir(exist_ok=True)
anew = "--force" in sys.argv
tell("anew" if anew else "resumed" if (directory / "half").exists() else "started")
if how == "slow" and not (directory / "half").exists(): time.sleep(30)
if how == "short": time.sleep(0.4)
if how == "killed" and not (directory / "resume.safetensors").exists():
    (directory / "resume.safetensors").write_bytes(b"state")
    time.sleep(0.3)
    import os; os.kill(os.getpid(), 9)
if how == "error": sys.exit("KeyError: 'gone'")
if how == "crowded" and not (directory / "tried").exists():
    (directory / "tried").touch()
    sys.exit("sce: error: memory ran out (Tried to allocate 1 GiB)")
if how == "memory": sys.exit("sce: error: memory ran out (Tried to allocate 1 GiB)")
(directory / "best.safetensors").write_bytes(b"weights")
(directory / "resume.safetensors").write_bytes(b"state")
(directory / "result.json").write_text(RESULT)
tell("finished")
"""
)


class Silent(SweepDisplay):
    """Watches, and remembers how many ran at once."""

    def __init__(self, on_look: Callable[[SweepRunner], object] = lambda sweep: None) -> None:
        super().__init__()
        self.most, self.on_look = 0, on_look

    def ended(self, sweep: SweepRunner, run: PlannedRun, row: Row | None) -> None: ...

    def looked(self, sweep: SweepRunner) -> None:
        self.most = max(self.most, len(sweep.running))
        self.on_look(sweep)


class Play:
    """A sweep of four runs, told apart by their batch sizes 1 to 4."""

    def __init__(self, path: Path, cycle: Dataset) -> None:
        (path / "mine.toml").write_text(
            "measure = 'steps'\n[[grid]]\ntraining.batch_size = [1, 2, 3, 4]"
        )
        self.runs = make_plan(load_sweep(path / "mine.toml"), [cycle]).runs
        self.place, self.told = SweepDirectory(path / "sweep"), path / "diary"
        self.place.make()
        self.how: dict[int, str] = {}  # by batch size; those not named just finish

    def command(self, run: PlannedRun, settings: Path, directory: Path, *, anew: bool) -> list[str]:
        how = self.how.get(run.settings["training.batch_size"], "well")
        told = [str(directory), how, str(self.told), *(["--force"] if anew else [])]
        return [sys.executable, "-c", PRETENDER, *told]

    def sweep(self, *sizes: int, watcher: SweepDisplay | None = None, **limits: Any) -> SweepRunner:
        runs = [self.runs[size - 1] for size in sizes or (1, 2, 3, 4)]
        made = SweepRunner(runs, self.place, **limits)
        made.run(watcher or Silent())
        return made

    def diary(self, size: int) -> list[str]:
        """What a run told, in order."""
        lines = self.told.read_text().splitlines() if self.told.exists() else []
        name = self.runs[size - 1].name
        return [word for word, whose in map(str.split, lines) if whose == name]

    def out_of_time_once(self, word: str, size: int) -> Silent:
        """Ends the time when the diary of a run has the word."""

        def hurry(sweep: SweepRunner) -> None:
            if word in self.diary(size):
                sweep.deadline = time.monotonic()

        return Silent(hurry)

    @property
    def rows(self) -> dict[int, Row]:
        return {row["settings"]["training.batch_size"]: row for row in read_rows(self.place.rows)}


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset.of("cycle", make_cycle(tmp_path_factory.mktemp("data") / "cycle"))


@pytest.fixture
def play(tmp_path: Path, cycle: Dataset, monkeypatch: pytest.MonkeyPatch) -> Play:
    made = Play(tmp_path, cycle)
    monkeypatch.setattr(runner, "_command", made.command)
    return made


def test_every_run_has_a_row_and_none_is_repeated(play: Play) -> None:
    state = play.sweep(jobs=2)
    assert (state.count("finished"), state.left) == (4, 0)
    row = play.rows[3]
    assert row["status"] == "finished"
    assert row["test"] == {"ndcg@10": 0.1}
    assert row["at_once"] == 2
    assert row["versions"]["torch"]
    assert row["versions"]["sce"] == sce.__version__
    before = play.place.rows.read_text()
    assert play.sweep().count("finished") == 4
    assert play.place.rows.read_text() == before
    assert play.diary(3) == ["started", "finished"]


def test_no_more_than_asked_run_at_once(play: Play) -> None:
    play.how = {1: "short", 2: "short", 3: "short"}
    watcher = Silent()
    play.sweep(watcher=watcher, jobs=3)
    assert watcher.most == 3
    assert [play.rows[size]["at_once"] for size in (1, 2, 3)] == [3, 3, 3]


def test_a_failure_is_a_row_and_not_the_end(play: Play) -> None:
    play.how = {2: "error", 3: "memory"}
    state = play.sweep()
    assert (state.count("finished"), state.count("failed")) == (2, 2)
    assert play.rows[2]["failure"] == {"kind": "error", "message": "KeyError: 'gone'"}
    assert play.rows[3]["failure"]["kind"] == "out of memory"
    play.how = {}  # it would go well now, but nobody asked
    assert play.sweep().count("failed") == 2
    assert play.sweep(retry_failed=True).count("finished") == 4
    assert play.diary(2) == ["started", "anew", "finished"]
    assert play.rows[2]["status"] == "finished"


def test_a_killed_run_goes_on_from_what_it_saved(play: Play) -> None:
    play.how = {1: "killed"}
    play.sweep(1)
    failure = play.rows[1]["failure"]
    assert failure["kind"] == "killed"
    assert failure["message"].endswith("--retry-failed goes on from what it saved")
    assert (play.place.runs / play.runs[0].name / "resume.safetensors").exists()
    assert play.sweep(1, retry_failed=True).count("finished") == 1
    assert play.diary(1) == ["started", "started", "finished"]  # and not anew


def test_no_memory_beside_others_is_tried_again_alone(play: Play) -> None:
    play.how = {1: "crowded", 2: "short", 3: "short", 4: "memory"}
    assert play.sweep(jobs=4).count("finished") == 3
    rows = play.rows
    assert (rows[1]["status"], rows[1]["at_once"]) == ("finished", 1)
    assert (rows[4]["failure"]["kind"], rows[4]["at_once"]) == ("out of memory", 1)
    assert play.diary(4) == ["started", "started"]


def test_weights_go_unless_they_are_wanted(play: Play) -> None:
    play.sweep(1)
    play.sweep(2, keep_weights=True)
    gone, kept = (play.place.runs / run.name for run in play.runs[:2])
    assert {file.name for file in gone.iterdir()} == {"result.json"}
    play.sweep(1, 2)  # later, without a word about weights
    assert (kept / "best.safetensors").exists()
    assert not (kept / "resume.safetensors").exists()


def test_when_the_time_is_over_runs_save_and_go_on_next_time(play: Play) -> None:
    play.how = {2: "slow"}
    state = play.sweep(watcher=play.out_of_time_once("started", 2), seconds=1000.0)
    assert state.stopping == "the time is over"
    assert (state.count("finished"), state.left) == (1, 3)
    assert play.diary(2) == ["started", "saved"]
    assert play.sweep().count("finished") == 4
    assert play.diary(2) == ["started", "saved", "resumed", "finished"]
    assert play.rows[2]["wall_seconds"] == pytest.approx(1.5, abs=0.7)
    assert play.rows[2]["at_once"] is None  # nobody knows how many ran beside it before
    assert play.diary(1) == ["started", "finished"]


def test_what_failed_and_was_then_stopped_goes_on_from_the_later_state(play: Play) -> None:
    play.how = {1: "error"}
    play.sweep(1)
    play.how = {1: "slow"}
    watcher = play.out_of_time_once("anew", 1)
    play.sweep(1, watcher=watcher, seconds=1000.0, retry_failed=True)
    assert play.rows[1]["status"] == "failed"  # so far nothing else is known
    assert play.sweep(1, retry_failed=True).count("finished") == 1
    assert play.diary(1) == ["started", "anew", "saved", "resumed", "finished"]


def test_when_nobody_reads_any_more_runs_save(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `sce sweep ... 2>&1 | head -1`."""
    play.how = {1: "short", 2: "slow"}
    monkeypatch.setattr(sys, "stderr", BrokenPipe())
    with SweepDisplay() as display:
        state = play.sweep(1, 2, 3, watcher=display, jobs=2)
    assert (state.signal, state.count("finished"), state.left) == (13, 1, 2)
    assert play.diary(2) == ["started", "saved"]
    assert play.diary(3) == []


class BrokenPipe(io.StringIO):
    """What is written into it reaches nobody."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_signal_lets_runs_save(play: Play) -> None:
    play.how = {1: "slow", 2: "slow"}

    def interrupt(state: SweepRunner) -> None:
        if play.diary(1) == play.diary(2) == ["started"] and state.signal is None:
            os.kill(os.getpid(), signal.SIGINT)

    state = play.sweep(watcher=Silent(interrupt), jobs=2)
    assert (state.signal, state.left) == (signal.SIGINT, 4)
    assert play.diary(1) == play.diary(2) == ["started", "saved"]
    assert play.rows == {}
    assert play.sweep(jobs=2).count("finished") == 4


def test_a_run_that_ended_unseen_gets_its_row(play: Play) -> None:
    play.sweep()
    lines = play.place.rows.read_text().splitlines(keepends=True)
    play.place.rows.write_text("".join(lines[:2]) + lines[2][:40])  # a crash while it was written
    assert play.sweep().count("finished") == 4
    assert all(play.diary(size) == ["started", "finished"] for size in (1, 2, 3, 4))
    assert play.rows[3]["at_once"] is None


def begin_sweep(here: Path, data: Path) -> "subprocess.Popen[bytes]":
    """Start a sweep of one slow run in a process of its own, and wait for the run."""
    program = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from sce.data.storage import locked
        from sce.experiments import runner
        from sce.experiments.datasets import open_dataset
        from sce.experiments.spec import load_sweep, make_plan
        from sce.experiments.store import SweepDirectory
        from tests.experiments.test_runner import PRETENDER, Silent
        here = Path({str(here)!r})
        (here / "mine.toml").write_text("measure = 'steps'")
        runner._command = lambda run, settings, directory, anew: [
            sys.executable, "-c", PRETENDER, str(directory), "slow", str(here / "diary")]
        place = SweepDirectory(here / "sweep")
        place.make()
        runs = make_plan(load_sweep(here / "mine.toml"), [open_dataset({str(data)!r})]).runs
        with locked(place.path, inherited=True) as lock:
            runner.SweepRunner(runs, place, lock=lock).run(Silent())
    """)
    root = Path(__file__).parents[2]
    started = subprocess.Popen([sys.executable, "-c", program], cwd=root, start_new_session=True)
    _wait_for(lambda: (here / "diary").exists() and "started" in (here / "diary").read_text())
    return started


def test_ctrl_c_is_for_the_sweep_which_tells_its_runs_once(tmp_path: Path, cycle: Dataset) -> None:
    """A terminal sends it to a whole group of processes, and a second one would end a run."""
    sweeping = begin_sweep(tmp_path, cycle.path)
    os.killpg(sweeping.pid, signal.SIGINT)
    assert sweeping.wait(timeout=30) == 0
    words = [line.split()[0] for line in (tmp_path / "diary").read_text().splitlines()]
    assert words == ["started", "saved"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere children outlive a killed parent")
def test_a_killed_sweep_takes_its_runs_with_it(tmp_path: Path, cycle: Dataset) -> None:
    """Even by SIGKILL: they are told to save, and until they have, nobody else may start."""
    sweeping = begin_sweep(tmp_path, cycle.path)
    place = SweepDirectory(tmp_path / "sweep")
    sweeping.kill()
    sweeping.wait()
    assert not _lockable(place)
    _wait_for(lambda: "saved" in (tmp_path / "diary").read_text())
    _wait_for(lambda: _lockable(place))


def _lockable(place: SweepDirectory) -> bool:
    try:
        with locked(place.path, inherited=True):
            return True
    except InputError:
        return False


def _wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
