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

from sce.data.storage import locked
from sce.errors import InputError
from sce.experiments import runner
from sce.experiments.datasets import Dataset
from sce.experiments.display import SweepDisplay
from sce.experiments.runner import SweepRunner
from sce.experiments.spec import PlannedRun, load_sweep, make_plan
from sce.experiments.store import Row, SweepDirectory, read_rows
from tests.cycle_data import make_cycle

pytestmark = pytest.mark.timeout(60)

# Tells its starts and ends into a file; saves when it is told to stop, and goes on from there.
PRETENDER = """
import json, signal, sys, time
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
(directory / "metrics.jsonl").write_text(json.dumps({"epoch": 1, "loss": 2.0,
    "validation": {"ndcg@10": 0.2}, "buckets": {"picked_once": 0.5}}) + "\\n")
(directory / "result.json").write_text(json.dumps({"best_epoch": 1, "test": {"ndcg@10": 0.1},
    "validation": {"ndcg@10": 0.2}, "memory_mib": {"training": 5000.0, "evaluation": None},
    "seconds": {"training": 1.5}}))
tell("finished")
"""
Behave = Callable[..., None]


class Silent(SweepDisplay):
    """Watches, and remembers how many ran at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.on_look: Callable[[SweepRunner], None] = lambda sweep: None

    def ended(self, sweep: SweepRunner, run: PlannedRun, row: Row | None) -> None: ...

    def looked(self, sweep: SweepRunner) -> None:
        self.most = max(self.most, len(sweep.running))
        self.on_look(sweep)


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset.of("cycle", make_cycle(tmp_path_factory.mktemp("data") / "cycle"))


@pytest.fixture
def place(tmp_path: Path) -> SweepDirectory:
    made = SweepDirectory(tmp_path / "sweep")
    made.make()
    return made


@pytest.fixture
def runs(tmp_path: Path, cycle: Dataset) -> tuple[PlannedRun, ...]:
    """Four, told apart by their batch sizes."""
    file = tmp_path / "mine.toml"
    file.write_text("[[grid]]\ntraining.batch_size = [1, 2, 3, 4]")
    return make_plan(load_sweep(file), [cycle]).runs


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Behave:
    """Say how the run of each batch size goes; those not named just finish."""

    def arrange(**how: str) -> None:
        def command(run: PlannedRun, settings: Path, directory: Path, *, anew: bool) -> list[str]:
            kind = how.get(f"of_{run.settings['training.batch_size']}", "well")
            diary = tmp_path / "diary"
            more = ["--force"] if anew else []
            return [sys.executable, "-c", PRETENDER, str(directory), kind, str(diary), *more]

        monkeypatch.setattr(runner, "_command", command)

    arrange()
    return arrange


def out_of_time_once(
    word: str, place: SweepDirectory, runs: tuple[PlannedRun, ...], size: int
) -> Silent:
    """Ends the time when the diary of a run has the word."""
    watcher = Silent()

    def hurry(sweep: SweepRunner) -> None:
        if word in diary(place, runs, size):
            sweep.deadline = time.monotonic()

    watcher.on_look = hurry
    return watcher


def diary(place: SweepDirectory, runs: tuple[PlannedRun, ...], batch_size: int) -> list[str]:
    """What the run of a batch size told, in order."""
    (run,) = [run for run in runs if run.settings["training.batch_size"] == batch_size]
    told = place.path.parent / "diary"
    lines = told.read_text().splitlines() if told.exists() else []
    return [word for word, name in map(str.split, lines) if name == run.name]


def sweep(
    runs: tuple[PlannedRun, ...],
    place: SweepDirectory,
    watcher: Silent | None = None,
    **limits: Any,
) -> SweepRunner:
    made = SweepRunner(runs, place, **limits)
    made.run(watcher or Silent())
    return made


def by_size(place: SweepDirectory) -> dict[int, Row]:
    return {row["settings"]["training.batch_size"]: row for row in read_rows(place.rows)}


def test_every_run_has_a_row_and_none_is_repeated(
    place: SweepDirectory, runs: tuple[PlannedRun, ...], behave: Behave
) -> None:
    state = sweep(runs, place, jobs=2)
    assert (state.count("finished"), state.left) == (4, 0)
    row = by_size(place)[3]
    assert row["status"] == "finished"
    assert row["test"] == {"ndcg@10": 0.1}
    assert row["buckets"] == {"picked_once": 0.5}
    assert row["history"]["validation.ndcg@10"] == [0.2]
    assert row["at_once"] == 2
    assert row["versions"]["torch"]
    before = place.rows.read_text()
    assert sweep(runs, place).count("finished") == 4
    assert place.rows.read_text() == before
    assert diary(place, runs, 3) == ["started", "finished"]


def test_no_more_than_asked_run_at_once(
    place: SweepDirectory, runs: tuple[PlannedRun, ...], behave: Behave
) -> None:
    behave(of_1="short", of_2="short", of_3="short")
    watcher = Silent()
    sweep(runs, place, watcher, jobs=3)
    assert watcher.most == 3
    assert [by_size(place)[size]["at_once"] for size in (1, 2, 3)] == [3, 3, 3]


def test_a_failure_is_a_row_and_not_the_end(
    place: SweepDirectory, runs: tuple[PlannedRun, ...], behave: Behave
) -> None:
    behave(of_2="error", of_3="memory")
    state = sweep(runs, place)
    assert (state.count("finished"), state.count("failed")) == (2, 2)
    rows = by_size(place)
    assert rows[2]["failure"] == {"kind": "error", "message": "KeyError: 'gone'"}
    assert rows[3]["failure"]["kind"] == "out of memory"
    behave()  # it would go well now, but nobody asked
    assert sweep(runs, place).count("failed") == 2
    assert sweep(runs, place, retry_failed=True).count("finished") == 4
    assert diary(place, runs, 2) == ["started", "anew", "finished"]
    assert by_size(place)[2]["status"] == "finished"


def test_a_killed_run_goes_on_from_what_it_saved(
    place: SweepDirectory, runs: tuple[PlannedRun, ...], behave: Behave
) -> None:
    behave(of_1="killed")
    sweep(runs[:1], place)
    failure = by_size(place)[1]["failure"]
    assert failure["kind"] == "killed"
    assert failure["message"].endswith("--retry-failed goes on from what it saved")
    assert (place.runs / runs[0].name / "resume.safetensors").exists()
    assert sweep(runs[:1], place, retry_failed=True).count("finished") == 1
    assert diary(place, runs, 1) == ["started", "started", "finished"]  # and not anew


def test_no_memory_beside_others_is_tried_again_alone(
    place: SweepDirectory, runs: tuple[PlannedRun, ...], behave: Behave
) -> None:
    behave(of_1="crowded", of_2="short", of_3="short", of_4="memory")
    state = sweep(runs, place, jobs=4)
    rows = by_size(place)
    assert rows[1]["status"] == "finished"
    assert rows[1]["at_once"] == 1
    assert (rows[4]["failure"]["kind"], rows[4]["at_once"]) == ("out of memory", 1)
    assert state.count("finished") == 3
    assert diary(place, runs, 4) == ["started", "started"]


def test_weights_go_unless_they_are_wanted(
    place: SweepDirectory, runs: tuple[PlannedRun, ...], behave: Behave
) -> None:
    sweep(runs[:1], place)
    sweep(runs[1:2], place, keep_weights=True)
    gone, kept = (place.runs / run.name for run in runs[:2])
    assert {file.name for file in gone.iterdir()} == {"metrics.jsonl", "result.json"}
    sweep(runs[:2], place)  # later, without a word about weights
    assert (kept / "best.safetensors").exists()
    assert not (kept / "resume.safetensors").exists()


def test_when_the_time_is_over_runs_save_and_go_on_next_time(
    place: SweepDirectory, runs: tuple[PlannedRun, ...], behave: Behave
) -> None:
    behave(of_2="slow")
    watcher = out_of_time_once("started", place, runs, 2)
    state = sweep(runs, place, watcher, jobs=1, seconds=1000.0)
    assert state.stopping == "the time is over"
    assert (state.count("finished"), state.left) == (1, 3)
    assert diary(place, runs, 2) == ["started", "saved"]
    assert sweep(runs, place).count("finished") == 4
    assert diary(place, runs, 2) == ["started", "saved", "resumed", "finished"]
    assert by_size(place)[2]["wall_seconds"] == pytest.approx(1.5, abs=0.7)
    assert by_size(place)[2]["at_once"] is None  # nobody knows how many ran beside it before
    assert diary(place, runs, 1) == ["started", "finished"]


def test_what_failed_and_was_then_stopped_goes_on_from_the_later_state(
    place: SweepDirectory, runs: tuple[PlannedRun, ...], behave: Behave
) -> None:
    behave(of_1="error")
    sweep(runs[:1], place)
    behave(of_1="slow")
    watcher = out_of_time_once("anew", place, runs, 1)
    sweep(runs[:1], place, watcher, seconds=1000.0, retry_failed=True)
    assert by_size(place)[1]["status"] == "failed"  # so far nothing else is known
    assert sweep(runs[:1], place, retry_failed=True).count("finished") == 1
    assert diary(place, runs, 1) == ["started", "anew", "saved", "resumed", "finished"]


def test_when_nobody_reads_any_more_runs_save(
    place: SweepDirectory,
    runs: tuple[PlannedRun, ...],
    behave: Behave,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with `sce sweep ... 2>&1 | head -1`."""
    behave(of_1="short", of_2="slow")
    monkeypatch.setattr(sys, "stderr", BrokenPipe())
    with SweepDisplay() as display:
        state = SweepRunner(runs[:3], place, jobs=2)
        state.run(display)
    assert (state.signal, state.count("finished"), state.left) == (13, 1, 2)
    assert diary(place, runs, 2) == ["started", "saved"]
    assert diary(place, runs, 3) == []


class BrokenPipe(io.StringIO):
    """What is written into it reaches nobody."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_signal_lets_runs_save(
    place: SweepDirectory, runs: tuple[PlannedRun, ...], behave: Behave
) -> None:
    behave(of_1="slow", of_2="slow")
    watcher = Silent()

    def interrupt(state: SweepRunner) -> None:
        told = place.path.parent / "diary"
        if told.exists() and told.read_text().count("started") == 2 and state.signal is None:
            os.kill(os.getpid(), signal.SIGINT)

    watcher.on_look = interrupt
    state = sweep(runs, place, watcher, jobs=2)
    assert (state.signal, state.left) == (signal.SIGINT, 4)
    assert diary(place, runs, 1) == diary(place, runs, 2) == ["started", "saved"]
    assert read_rows(place.rows) == []
    assert sweep(runs, place, jobs=2).count("finished") == 4


def test_a_run_that_ended_unseen_gets_its_row(
    place: SweepDirectory, runs: tuple[PlannedRun, ...], behave: Behave
) -> None:
    sweep(runs, place)
    lines = place.rows.read_text().splitlines(keepends=True)
    place.rows.write_text("".join(lines[:2]) + lines[2][:40])  # a crash while it was written
    assert sweep(runs, place).count("finished") == 4
    assert all(diary(place, runs, size) == ["started", "finished"] for size in (1, 2, 3, 4))
    assert by_size(place)[3]["at_once"] is None


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
        (here / "mine.toml").write_text("")
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
