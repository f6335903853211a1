"""The progress of a sweep: on a terminal what runs now, elsewhere a line for each run that ends."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sce.experiments.runner import Child, SweepRunner
from sce.experiments.spec import PlannedRun
from sce.experiments.store import FAILED, FINISHED, Row
from sce.progress import PipedConsole
from sce.units import show_duration, show_memory

_REFRESH = 0.5  # seconds
_SCORE = "ndcg@10"


class SweepDisplay:
    """Shows a sweep on stderr; nothing more once that cannot be written."""

    def __init__(self) -> None:
        self.gone = False  # the reader went away, as `head` does: the sweep stops
        self._stop_told = False
        self._console = PipedConsole(stderr=True, highlight=False, emoji=False)
        # Refreshed here, not by a thread: processes are forked. Shows nothing but on a terminal.
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._shown = 0.0

    def __enter__(self) -> "SweepDisplay":
        with self._surviving():
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._surviving():
            self._live.stop()

    def ended(self, sweep: SweepRunner, run: PlannedRun, row: Row | None) -> None:
        """Leave a line; without a row the run was stopped, or must try again."""
        outcome = _outcome(row)
        if row is None and run in sweep.waiting:
            outcome = "found no memory beside others; tries again alone, after them"
        self.tell(f"[{len(sweep.rows)}/{sweep.total}] {run.label}: {outcome}")
        self._shown = 0.0

    def looked(self, sweep: SweepRunner) -> None:
        """Keep what is shown up to date."""
        if sweep.stopping is not None and not self._stop_told:
            self._stop_told = True
            saving = f"{len(sweep.running)} running save, to go on next time"
            self.tell(f"{sweep.stopping}: {saving}; Ctrl-C ends them at once")
        if self._console.is_terminal and time.monotonic() - self._shown > _REFRESH:
            self._shown = time.monotonic()
            with self._surviving():
                self._live.update(draw(sweep), refresh=True)

    def tell(self, text: str) -> None:
        """Leave a line."""
        with self._surviving():
            self._console.print(f"sce: {text}", markup=False, soft_wrap=True)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Fall silent where stderr cannot be written: that is no reason to lose the runs."""
        try:
            yield
        except OSError as error:
            self._console.quiet = True
            self.gone = self.gone or isinstance(error, BrokenPipeError)


def draw(sweep: SweepRunner) -> Group:
    """Draw the sweep as it stands: what runs, the counts, and the best so far."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for child in sweep.running:
        course = "saving" if child.stopped else _course(child)
        table.add_row(child.run.label, course, show_duration(child.seconds))
    finished, failed = sweep.count(FINISHED), sweep.count(FAILED)
    words = [f"{finished} of {sweep.total} finished"]
    words += [f"{failed} failed"] if failed else []
    words += [f"{len(sweep.running)} running", f"{len(sweep.waiting)} waiting"]
    words.append(f"{show_duration(sweep.seconds)} so far")
    if sweep.deadline < math.inf:
        words.append(f"stops in {show_duration(max(0.0, sweep.deadline - time.monotonic()))}")
    if sweep.stopping is not None:
        words = [f"{sweep.stopping}: {len(sweep.running)} still saving"]
    best: dict[str, tuple[float, str]] = {}  # of each dataset, by validation
    for row in sweep.rows.values():
        name, score = row["dataset"]["name"], _score(row, "validation") or -1.0
        best[name] = max(best.get(name, (0.0, "")), (score, row["settings"]["loss.name"]))
    scores = [f"{name} {score:.4f} by {loss}" for name, (score, loss) in best.items() if loss]
    words += [f"best validation {_SCORE} so far: {', '.join(scores)}"] if scores else []
    return Group(table, Text(", ".join(words)))


def _course(child: Child) -> str:
    """The epoch of a run and its score, from the last line of its metrics."""
    try:
        lines = (child.path / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        record: dict[str, Any] = json.loads(lines[-1])
    except (OSError, ValueError, IndexError):
        return "starting"
    words = f"epoch {record['epoch']}/{child.run.settings['training.epochs']}"
    score = _score(record, "validation")
    return words if score is None else f"{words}  {_SCORE} {score:.4f}"


def _outcome(row: Row | None) -> str:
    if row is None:
        return "stopped for now"
    if row["status"] == FAILED:
        return f"{row['failure']['kind']}: {row['failure']['message']}"
    scores = {split: _score(row, split) for split in ("validation", "test")}
    words = [
        f"{split} {_SCORE} {value:.4f}" for split, value in scores.items() if value is not None
    ]
    words.append(show_memory((row.get("memory_mib") or {}).get("training")))
    words += [show_duration(row["wall_seconds"])] if row.get("wall_seconds") is not None else []
    return ", ".join(words)


def _score(record: Row, split: str) -> float | None:
    found: float | None = (record.get(split) or {}).get(_SCORE)
    return found
