"""Running a sweep: so many processes at once, within a time, as far as it is not done yet.

On a terminal a bar shows what runs now; elsewhere there is a line for each run that ends.
"""

import ctypes
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sce.data.storage import append_json_line, own_file, tidy, write_text
from sce.experiments import store
from sce.experiments.spec import PlannedRun
from sce.experiments.store import FAILED, Row, SweepDirectory
from sce.progress import ProgressDisplay
from sce.training.signals import Interrupts
from sce.units import show_duration, show_memory

OUT_OF_MEMORY, DIVERGED, KILLED, ERROR = "out of memory", "diverged", "killed", "error"

_TICK = 0.1  # seconds between looks at the processes
_PATIENCE = 120.0  # seconds to save in, before a process is ended for good
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_OUTPUT = 20_000  # bytes at the end of a log that explain a failure
_MEMORY = re.compile(
    r"memory ran out|out of memory|OutOfMemoryError|can't allocate memory|ALLOC_FAILED"
    r"|Unable to allocate|MemoryError|Memory allocation (still )?failed|does not fit into memory",
    re.IGNORECASE,
)
_DIVERGENCE = re.compile(r"the loss became|stopped being numbers")
_LONGEST = 400  # letters of a message
_SCORE = "ndcg@10"


class SweepRunner:
    """Runs a plan, `jobs` at once, and holds how far it is.

    After so many `seconds` no run starts any more, and running ones are told to save. Every run
    holds the directory's `lock`, a descriptor, too.
    """

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        directory: SweepDirectory,
        *,
        jobs: int = 1,
        seconds: float | None = None,
        keep_weights: bool = False,
        retry_failed: bool = False,
        lock: int | None = None,
    ) -> None:
        self.directory, self.keep_weights = directory, keep_weights
        self._jobs, self._lock = jobs, lock
        self.begun = time.monotonic()
        self.deadline = math.inf if seconds is None else self.begun + seconds
        self.total = len(runs)
        self.waiting: deque[PlannedRun] = deque()
        self.running: list[Child] = []
        self.rows: dict[str, Row] = {}
        self.left = 0  # runs that were stopped, or not started for want of time
        self.stopping: str | None = None  # why no run starts any more
        self.signal: int | None = None  # the signal that stopped the sweep
        self._anew: set[str] = set()  # failed before, and left nothing to go on with
        self._alone: set[str] = set()  # found no memory beside others: get all of it once
        found = {row["key"]: row for row in store.read_rows(directory.rows)}
        for run in runs:
            row, path = found.get(run.key), directory.runs / run.name
            if row is None and (path / "result.json").is_file():
                # It ended, and the sweep was killed before it could say so.
                row = self._finish(run, path, at_once=None, wall=None)
            if row is not None and (row["status"] != FAILED or not retry_failed):
                self.rows[run.key] = row
                continue
            self.waiting.append(run)
            # A failure takes its state with it: one that is there is of a later, better attempt.
            if row is not None and not store.can_resume(path):
                self._anew.add(run.key)

    def run(self, display: "SweepDisplay") -> None:
        """Run what has no row yet, and give every run a row.

        Signals stop it: Ctrl-C and SIGTERM tell the running ones to save, a second one ends them.
        So does a display whose reader is gone.
        """
        try:
            with Interrupts(wanted=True, say=False) as interrupts:
                while self.waiting or self.running:
                    if display.gone:
                        interrupts.lose_reader()
                    self._notice_stop(interrupts.received)
                    self._start()
                    for child in [child for child in self.running if child.poll() is not None]:
                        self.running.remove(child)
                        display.ended(self, child.run, self._end(child))
                    display.looked(self)
                    if self.running:
                        time.sleep(_TICK)
        except BaseException:
            for child in self.running:  # no process stays
                child.kill()
            raise

    def count(self, status: str) -> int:
        """Return how many runs came to such an end."""
        return sum(row["status"] == status for row in self.rows.values())

    @property
    def seconds(self) -> float:
        """Seconds since the sweep began."""
        return time.monotonic() - self.begun

    def _notice_stop(self, received: int | None) -> None:
        if received is not None and self.signal is None:
            self.signal, self.stopping = received, "interrupted"
        elif self.stopping is None and time.monotonic() >= self.deadline:
            self.stopping = "the time is over"
        if self.stopping is not None:
            self.left += len(self.waiting)
            self.waiting.clear()
            for child in self.running:
                child.stop()

    def _start(self) -> None:
        """Start as many runs as there is room for; those that need all memory come last, alone."""
        while self.waiting and len(self.running) < self._jobs:
            crowd = [run for run in self.waiting if run.key not in self._alone]
            if self.running and (not crowd or self.running[0].run.key in self._alone):
                return
            run = (crowd or self.waiting)[0]
            self.waiting.remove(run)
            anew = run.key in self._anew
            child = Child(run, self.directory.runs, anew=anew, lock=self._lock, jobs=self._jobs)
            self.running.append(child)
            for child in self.running:
                child.at_once = max(child.at_once, len(self.running))

    def _end(self, child: "Child") -> Row | None:
        """Give a run that ended its row; None if it has more to do."""
        run, status = child.run, child.poll()
        assert status is not None
        at_once = None if child.resumed else child.at_once
        if status == 0 and (child.path / "result.json").is_file():
            return self._finish(run, child.path, at_once=at_once, wall=child.seconds)
        if child.stopped or status in (130, 143):  # it saved and ended, as somebody asked
            self.left += 1
            return None
        kind, message = explain_failure(status, child.output())
        if kind == OUT_OF_MEMORY and child.at_once > 1 and run.key not in self._alone:
            self._alone.add(run.key)
            self.waiting.append(run)
            return None
        if kind == KILLED and store.can_resume(child.path):  # it was well until then
            message += "; --retry-failed goes on from what it saved"
        else:
            self.directory.trim(child.path, weights=False)
        failure = {"failure": {"kind": kind, "message": message}}
        return self._keep(store.planned_row(run, FAILED, at_once, child.seconds) | failure)

    def _finish(
        self, run: PlannedRun, path: Path, *, at_once: int | None, wall: float | None
    ) -> Row:
        row = self._keep(store.finished_row(run, path, at_once=at_once, wall=wall))
        self.directory.trim(path, weights=self.keep_weights)
        return row

    def _keep(self, row: Row) -> Row:
        append_json_line(self.directory.rows, row)
        self.rows[row["key"]] = row
        return row


class Child:
    """The process of a run: its peak memory is its own. Writes `RUNS/NAME` and `RUNS/NAME.log`.

    It goes on where the run was stopped, unless it is to start `anew`.
    """

    def __init__(
        self, run: PlannedRun, runs: Path, *, anew: bool, lock: int | None, jobs: int = 1
    ) -> None:
        self.run, self.path = run, runs / run.name
        self.resumed = not anew and store.can_resume(self.path)
        self.at_once = 1
        self._begun = time.monotonic()
        self._asked = math.inf  # when it was asked to stop
        self._log = runs / f"{run.name}.log"
        settings = runs / f"{run.name}.toml"
        write_text(settings, run.to_toml())
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
        with open(self._log, "ab", opener=own_file) as log:
            self._earlier = log.tell()  # output of earlier attempts
            self._process = subprocess.Popen(
                _command(run, settings, self.path, anew=anew),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**(threads if jobs > 1 else {}), **os.environ},
                # Ctrl-C is for the sweep: it tells its runs, once.
                start_new_session=True,
                pass_fds=() if lock is None else (lock,),
                preexec_fn=_dies_with(os.getpid()),
            )

    @property
    def stopped(self) -> bool:
        """True if it was asked to stop."""
        return self._asked < math.inf

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._begun

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        if time.monotonic() - self._asked > _PATIENCE:
            self._process.kill()
        return self._process.poll()

    def stop(self) -> None:
        """Ask it to save and end; a second time does nothing."""
        if not self.stopped:
            self._asked = time.monotonic()
            self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def output(self) -> str:
        """Return the end of its output."""
        with self._log.open("rb") as file:
            file.seek(max(self._earlier, self._log.stat().st_size - _OUTPUT))
            return file.read().decode(errors="replace")


def _command(run: PlannedRun, settings: Path, path: Path, *, anew: bool) -> list[str]:
    shared = [str(run.dataset.path), "--config", str(settings), "--out", str(path)]
    if run.measure == "steps":
        module = ["-m", "sce.experiments.step_memory"]
        return [sys.executable, *module, *shared, "--steps", str(run.steps)]
    tidy(path)  # one that was killed while it began anew may have been moved aside
    how = ["--force"] if anew else ["--resume"] if path.exists() else []
    return [sys.executable, "-m", "sce", "train", *shared, *how]


def _dies_with(parent: int) -> Callable[[], None] | None:
    """Make a child ask to be told to stop when the sweep is gone, however it went."""
    if sys.platform != "linux":
        return None
    ask = ctypes.CDLL(None).prctl  # found here: between fork and exec little is allowed

    def arrange() -> None:
        ask(_DIE_WITH_PARENT, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)  # it went before we asked

    return arrange


def explain_failure(status: int, said: str) -> tuple[str, str]:
    """The kind of a failure and a message, of an exit status (negative: a signal) and the output.

    >>> explain_failure(2, "sce: error: memory ran out (Tried to allocate 3 GiB)")
    ('out of memory', 'memory ran out (Tried to allocate 3 GiB)')
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it said nothing"]
    errors = [line for line in lines if line.startswith("sce: error: ")]
    message = (errors or lines)[-1].removeprefix("sce: error: ")
    message = message if len(message) <= _LONGEST else message[:_LONGEST] + " ..."
    if status < 0:
        why = ": perhaps the system ran out of memory" if status == -9 else ""
        return KILLED, f"ended by signal {-status}{why}; last words: {message}"
    ending = "\n".join(lines[-5:])
    if _MEMORY.search(ending):
        return OUT_OF_MEMORY, message
    return DIVERGED if _DIVERGENCE.search(ending) else ERROR, message


class SweepDisplay(ProgressDisplay):
    """Shows a sweep on stderr; nothing more once that cannot be written."""

    def __init__(self) -> None:
        super().__init__(on_lost=self._lose)
        self.gone = False  # the reader went away, as `head` does: the sweep stops
        self._stop_told = False

    def _lose(self) -> None:
        self.gone = True

    def ended(self, sweep: SweepRunner, run: PlannedRun, row: Row | None) -> None:
        """Leave a line; without a row the run was stopped, or must try again."""
        outcome = _outcome(row)
        if row is None and run in sweep.waiting:
            outcome = "found no memory beside others; tries again alone, after them"
        self.print(f"sce: [{len(sweep.rows)}/{sweep.total}] {run.label}: {outcome}")

    def looked(self, sweep: SweepRunner) -> None:
        """Keep what is shown up to date."""
        if sweep.stopping is not None and not self._stop_told:
            self._stop_told = True
            saving = f"{len(sweep.running)} running save, to go on next time"
            self.print(f"sce: {sweep.stopping}: {saving}; Ctrl-C ends them at once")
        if self.due:
            left = sweep.deadline - time.monotonic() if sweep.deadline < math.inf else None
            done = len(sweep.rows)
            self.update("sweeping", done, sweep.total, "runs", facts=describe(sweep), left=left)


def describe(sweep: SweepRunner) -> str:
    """What runs and what failed, and the best so far."""
    words = [
        f"{child.run.label} {'saving' if child.stopped else _course(child)}"
        for child in sweep.running
    ]
    words += [f"{failed} failed"] if (failed := sweep.count(FAILED)) else []
    best: dict[str, tuple[float, str]] = {}  # of each dataset, by validation
    for row in sweep.rows.values():
        name, score = row["dataset"]["name"], store.lookup(row, "validation", _SCORE) or -1.0
        best[name] = max(best.get(name, (0.0, "")), (score, row["settings"]["loss.name"]))
    scores = [f"{name} {score:.4f} by {loss}" for name, (score, loss) in best.items() if loss]
    words += [f"best validation {_SCORE}: {', '.join(scores)}"] if scores else []
    return "; ".join(words)


def _course(child: Child) -> str:
    """The epoch of a run and its score, from the last line of its metrics."""
    try:
        lines = (child.path / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        record: dict[str, Any] = json.loads(lines[-1])
    except (OSError, ValueError, IndexError):
        return "starting"
    words = f"epoch {record['epoch']}/{child.run.settings['training.epochs']}"
    score = store.lookup(record, "validation", _SCORE)
    return words if score is None else f"{words} {_SCORE} {score:.4f}"


def _outcome(row: Row | None) -> str:
    if row is None:
        return "stopped for now"
    if row["status"] == FAILED:
        return f"{row['failure']['kind']}: {row['failure']['message']}"
    words = [
        f"{split} {_SCORE} {value:.4f}"
        for split in ("validation", "test")
        if (value := store.lookup(row, split, _SCORE)) is not None
    ]
    words.append(show_memory(store.lookup(row, "memory_mib", "training")))
    words += [show_duration(row["wall_seconds"])] if row.get("wall_seconds") is not None else []
    return ", ".join(words)
