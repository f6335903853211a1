"""What is seen of a sweep: on a terminal what runs now, elsewhere a line for each run that ends."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sce.experiments.child import Child
from sce.experiments.plan import PlannedRun
from sce.experiments.rows import FAILED, FINISHED, Row
from sce.experiments.state import State
from sce.training.display import PipedConsole
from sce.units import plural, show_duration, show_memory

_REFRESH = 0.5  # seconds
_BAR = 24  # letters
_SCORE = "ndcg@10"


class SweepDisplay:
    """Tells about a sweep on stderr; nothing more once that cannot be written."""

    def __init__(self, jobs: int) -> None:
        self.gone = False
        self._jobs, self._silent = jobs, False
        self._console = PipedConsole(stderr=True, highlight=False)
        self._live: Live | None = None
        self._shown, self._told = 0.0, False
        if self._console.is_terminal:
            # Refreshed here, not by a thread: processes are forked.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> "SweepDisplay":
        if self._live is not None:
            with self._surviving():
                self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with self._surviving():
                self._live.stop()

    def started(self, state: State, child: Child) -> None:
        """Nothing to leave behind: what runs is seen while it does."""
        self._refresh(state, force=True)

    def ended(self, state: State, run: PlannedRun, row: Row | None) -> None:
        """Leave a line."""
        done = state.count(FINISHED) + state.count(FAILED)
        outcome = _outcome(row)
        if row is None and run in state.waiting:
            outcome = "found no memory beside others; tries again alone, after them"
        self.tell(f"[{done}/{state.total}] {run.label}: {outcome}")
        self._refresh(state, force=True)

    def put_off(self, state: State, runs: Sequence[PlannedRun], needs: float, left: float) -> None:
        """Leave a line."""
        which = runs[0].label if len(runs) == 1 else f"{plural(len(runs), 'run')}; the shortest"
        times = f"is expected to take {show_duration(needs)}, and {show_duration(left)} are left"
        self.tell(f"not started: {which} {times}")

    def looked(self, state: State) -> None:
        """Keep what is seen up to date."""
        if state.stopping is not None and not self._told:
            self._told = True
            saving = f"{len(state.running)} running save, to go on next time"
            self.tell(f"{state.stopping}: {saving}; Ctrl-C ends them at once")
        self._refresh(state)

    def tell(self, text: str) -> None:
        """Leave a line."""
        if self._silent:
            return
        with self._surviving():
            if self._live is None:
                print(f"sce: {text}", file=sys.stderr, flush=True)
            else:
                self._console.print(text, markup=False, soft_wrap=True)

    def _refresh(self, state: State, *, force: bool = False) -> None:
        now = time.monotonic()
        due = force or now - self._shown > _REFRESH
        if self._live is not None and due and not self._silent:
            self._shown = now
            with self._surviving():
                self._live.update(draw(state, self._jobs), refresh=True)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Fall silent where stderr cannot be written: what runs is not to be lost for that."""
        try:
            yield
        except OSError as error:
            self._silent = True
            self.gone = self.gone or isinstance(error, BrokenPipeError)


def draw(state: State, jobs: int) -> Group:
    """The sweep as it stands: what runs, a bar, the counts, and the best so far."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for child in state.running:
        table.add_row(
            child.run.label,
            "saving" if child.stopped else _course(child),
            show_duration(child.seconds),
        )
    finished, failed = state.count(FINISHED), state.count(FAILED)
    words = [f"{finished} of {state.total} finished"]
    words += [f"{failed} failed"] if failed else []
    words += [f"{len(state.running)} running", f"{len(state.waiting)} waiting"]
    words.append(f"{show_duration(state.seconds)} so far")
    left = state.seconds_left(jobs)
    words += [] if left is None else [f"about {show_duration(left)} left"]
    if state.deadline is not None:
        words.append(f"stops in {show_duration(max(0.0, state.deadline - time.monotonic()))}")
    if state.stopping is not None:
        words = [f"{state.stopping}: {len(state.running)} still saving"]
    line = Table.grid(padding=(0, 1))
    line.add_column(width=_BAR)
    line.add_row(ProgressBar(state.total, finished + failed, width=_BAR), ", ".join(words))
    best = _best(state)
    return Group(table, line, *([Text(best)] if best else []))


def _best(state: State) -> str:
    """The best run of each dataset, by validation."""
    best: dict[str, Row] = {}
    for row in state.rows.values():
        score = _score(row, "validation")
        name = row["dataset"]["name"]
        if score is not None and score > (_score(best.get(name, {}), "validation") or -1.0):
            best[name] = row
    parts = [
        f"{name} {_score(row, 'validation'):.4f} by {row['settings']['loss.name']}"
        for name, row in best.items()
    ]
    return f"best validation {_SCORE} so far: " + ", ".join(parts) if parts else ""


def _course(child: Child) -> str:
    """How far a run is, from the last line of its records."""
    try:
        lines = (child.directory / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        record: dict[str, Any] = json.loads(lines[-1])
    except (OSError, ValueError, IndexError):
        return "starting"
    words = f"epoch {record['epoch']}/{child.run.config.training.epochs}"
    score = (record.get("validation") or {}).get(_SCORE)
    return words if score is None else f"{words}  {_SCORE} {score:.4f}"


def _outcome(row: Row | None) -> str:
    if row is None:
        return "stopped for now"
    if row["status"] == FAILED:
        return f"{row['failure']['kind']}: {row['failure']['message']}"
    words = [
        f"{split} {_SCORE} {score:.4f}"
        for split in ("validation", "test")
        if (score := _score(row, split)) is not None
    ]
    words.append(show_memory((row.get("memory_mib") or {}).get("training")))
    if row.get("wall_seconds") is not None:
        words.append(show_duration(row["wall_seconds"]))
    return ", ".join(words)


def _score(row: Row, split: str) -> float | None:
    found: float | None = (row.get(split) or {}).get(_SCORE)
    return found
