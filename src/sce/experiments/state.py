"""How far a sweep is, what limits it, and who is told."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sce.experiments.child import Child
from sce.experiments.forecast import Forecast
from sce.experiments.plan import PlannedRun
from sce.experiments.rows import Row


@dataclass(frozen=True)
class Limits:
    """How much may be done at once, and until when."""

    jobs: int = 1
    """Runs at once."""
    seconds: float | None = None
    """Until no run starts, and running ones are told to save."""
    memory_mib: float | None = None
    """For all that run at once."""
    keep_weights: bool = False
    """Keep the weights of finished runs."""
    retry_failed: bool = False
    """Run again what failed before."""


@dataclass
class State:
    """How far the sweep is."""

    total: int
    begun: float
    """By the monotonic clock."""
    deadline: float | None
    waiting: deque[PlannedRun]
    running: list[Child] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    """Of the plan's runs, by key."""
    started: int = 0
    """Runs that this sweep began, or went on with."""
    done: dict[str, float] = field(default_factory=dict)
    """Seconds that half-finished runs have had before."""
    left: int = 0
    """Runs that were stopped, or not started for want of time."""
    stopping: str | None = None
    """Why no run starts any more."""
    signal: int | None = None
    """That stopped the sweep."""
    forecast: Forecast = field(default_factory=Forecast)
    again: set[str] = field(default_factory=set)
    """Runs that failed before by themselves, and left nothing to go on with."""
    alone: set[str] = field(default_factory=set)
    """Runs that found no memory beside others: they get all of it once."""

    def count(self, status: str) -> int:
        """How many runs came to such an end."""
        return sum(row["status"] == status for row in self.rows.values())

    @property
    def seconds(self) -> float:
        """Since the sweep began."""
        return time.monotonic() - self.begun

    def remaining(self, run: PlannedRun) -> float | None:
        """How long a waiting run will still take; None when nothing like it has ended."""
        whole = self.forecast.seconds(run)
        return None if whole is None else max(0.0, whole - self.done.get(run.key, 0.0))

    def seconds_left(self, jobs: int) -> float | None:
        """How long the rest will take, as far as runs like it tell."""
        waits = [self.remaining(run) for run in self.waiting]
        goes = [(self.forecast.seconds(c.run), c.seconds) for c in self.running]
        if any(wait is None for wait in waits) or any(all_ is None for all_, _ in goes):
            return None
        rest = sum(wait or 0.0 for wait in waits)
        rest += sum(max(0.0, (all_ or 0.0) - gone) for all_, gone in goes)
        return rest / max(1, min(jobs, len(self.waiting) + len(self.running)))


class Watcher(Protocol):
    """Is told what happens."""

    @property
    def gone(self) -> bool:
        """Whether whoever was told went away, as `head` does: then the sweep stops."""

    def started(self, state: State, child: Child) -> None:
        """A run began, or went on."""

    def ended(self, state: State, run: PlannedRun, row: Row | None) -> None:
        """A run ended; without a row it was stopped, or must try again."""

    def put_off(self, state: State, runs: Sequence[PlannedRun], needs: float, left: float) -> None:
        """Runs are left for next time: even the shortest needs more seconds than are left."""

    def looked(self, state: State) -> None:
        """Nothing happened for a moment."""
