"""The progress of a sweep: on a terminal what runs now, elsewhere a line for each run that ends."""

import json
import math
import time
from typing import Any

from sce.experiments.runner import Child, SweepRunner
from sce.experiments.spec import PlannedRun
from sce.experiments.store import FAILED, Row
from sce.progress import ProgressDisplay
from sce.units import show_duration, show_memory

_SCORE = "ndcg@10"


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
        name, score = row["dataset"]["name"], _score(row, "validation") or -1.0
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
    score = _score(record, "validation")
    return words if score is None else f"{words} {_SCORE} {score:.4f}"


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
