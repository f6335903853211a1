"""Running a plan: so many processes at once, within budgets, and as far as it is not done yet."""

import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sce.experiments.child import Child, can_resume, seconds_done
from sce.experiments.failures import KILLED, OUT_OF_MEMORY, Failure, explain_failure
from sce.experiments.place import Place
from sce.experiments.plan import PlannedRun
from sce.experiments.results import failed_row, finished_row
from sce.experiments.rows import FAILED, OVER_BUDGET, Row, append_row, read_rows
from sce.experiments.state import Limits, State, Watcher
from sce.training.interrupt import Interrupts

_TICK = 0.1  # seconds between looks at the processes


def run_sweep(
    runs: Sequence[PlannedRun],
    place: Place,
    limits: Limits,
    watcher: Watcher,
    *,
    lock: int | None = None,
) -> State:
    """Run what has no row yet, and give every run a row.

    Signals stop it: Ctrl-C and SIGTERM tell the running ones to save, a second one ends them. So
    does a watcher that is gone.

    Args:
        runs: The plan.
        place: Where everything is kept.
        limits: Of time, memory, and how many at once.
        watcher: Told what happens.
        lock: What `Place.lock` gave.
    """
    begun = time.monotonic()
    state = State(
        total=len(runs),
        begun=begun,
        deadline=None if limits.seconds is None else begun + limits.seconds,
        waiting=deque(),
    )
    _take_up(state, runs, place, limits)
    with Interrupts(wanted=True, say=False) as interrupts, _nothing_left_behind(state):
        while state.waiting or state.running:
            if watcher.gone:
                interrupts.lose_reader()
            _notice_stop(state, interrupts)
            if state.stopping is None:
                _start(state, place, limits, watcher, lock)
            for child in [child for child in state.running if child.poll() is not None]:
                state.running.remove(child)
                row = _end(state, child, place, limits)
                watcher.ended(state, child.run, row)
            watcher.looked(state)
            if state.running:
                time.sleep(_TICK)
    return state


@contextmanager
def _nothing_left_behind(state: State) -> Iterator[None]:
    """Whatever goes wrong, no process stays."""
    try:
        yield
    except BaseException:
        for child in state.running:
            child.kill()
        raise


def _take_up(state: State, runs: Sequence[PlannedRun], place: Place, limits: Limits) -> None:
    """Sort the plan into what is done and what is to be done."""
    found = {row["key"]: row for row in read_rows(place.rows)}
    for run in runs:
        row, directory = found.get(run.key), place.runs / run.name
        if row is None and (directory / "result.json").is_file():
            # It ended, and the sweep was killed before it could say so.
            row = finished_row(run, directory, at_once=None, wall=None)
            append_row(place.rows, row)
            place.trim(directory, weights=limits.keep_weights)
        again = (
            row is not None
            and row["status"] == FAILED
            and (limits.retry_failed or row["failure"]["kind"] == OVER_BUDGET)
        )
        if row is None or again:
            state.waiting.append(run)
            state.done[run.key] = seconds_done(run, place.runs)
            # A failure takes its state with it: one that is there is of a later, better attempt.
            failed = row is not None and row["failure"]["kind"] != OVER_BUDGET
            if failed and not can_resume(directory):
                state.again.add(run.key)
            continue
        state.rows[run.key] = row
        state.forecast.learn(row)


def _notice_stop(state: State, interrupts: Interrupts) -> None:
    if interrupts.received is not None and state.signal is None:
        state.signal = interrupts.received
        state.stopping = "interrupted"
    elif state.stopping is None and time.monotonic() >= (state.deadline or math.inf):
        state.stopping = "the time is over"
    if state.stopping is not None:
        state.left += len(state.waiting)
        state.waiting.clear()
        for child in state.running:
            child.stop()


def _start(state: State, place: Place, limits: Limits, watcher: Watcher, lock: int | None) -> None:
    """Start what fits, in order; what does not fit yet lets the next go first."""
    late: list[PlannedRun] = []
    for run in list(state.waiting):
        if len(state.running) >= limits.jobs:
            return
        needs = state.forecast.mib(run) if limits.memory_mib is not None else 0.0
        if limits.memory_mib is not None and needs > limits.memory_mib:
            state.waiting.remove(run)
            text = f"it needs about {needs:,.0f} MiB and may take {limits.memory_mib:,.0f}"
            row = failed_row(run, Failure(OVER_BUDGET, text), at_once=None, wall=None)
            _keep(state, place, run, row)
            watcher.ended(state, run, row)
            continue
        if not _fits(state, run, needs, limits):
            continue
        if _in_time(state, run):
            _begin(state, run, place, watcher, lock)
        else:
            late.append(run)
    if late and not state.running:
        late.sort(key=lambda run: state.remaining(run) or 0.0)
        if state.started:
            _put_off(state, late, watcher)
        else:
            # It will be stopped, and goes on next time: so every sweep gets somewhere.
            _begin(state, late[0], place, watcher, lock)


def _begin(state: State, run: PlannedRun, place: Place, watcher: Watcher, lock: int | None) -> None:
    state.waiting.remove(run)
    child = Child(run, place.runs, anew=run.key in state.again, lock=lock)
    state.running.append(child)
    state.started += 1
    for beside in state.running:
        beside.at_once = max(beside.at_once, len(state.running))
    watcher.started(state, child)


def _put_off(state: State, late: Sequence[PlannedRun], watcher: Watcher) -> None:
    """Leave runs for next time, the shortest of them first in the list."""
    for run in late:
        state.waiting.remove(run)
    state.left += len(late)
    left = (state.deadline or math.inf) - time.monotonic()
    watcher.put_off(state, late, state.remaining(late[0]) or 0.0, max(0.0, left))


def _fits(state: State, run: PlannedRun, needs: float, limits: Limits) -> bool:
    if not state.running:
        return run.key not in state.alone or len(state.waiting) == len(state.alone)
    if run.key in state.alone or any(child.run.key in state.alone for child in state.running):
        return False
    if limits.memory_mib is None:
        return True
    taken = sum(state.forecast.mib(child.run) for child in state.running)
    return taken + needs <= limits.memory_mib


def _in_time(state: State, run: PlannedRun) -> bool:
    if state.deadline is None:
        return True
    needs = state.remaining(run)
    return needs is None or time.monotonic() + needs <= state.deadline


def _end(state: State, child: Child, place: Place, limits: Limits) -> Row | None:
    """Give a run that ended its row; None if it has more to do."""
    run, status = child.run, child.poll()
    assert status is not None
    if (child.directory / "result.json").is_file() and status == 0:
        row = finished_row(run, child.directory, at_once=child.most_at_once, wall=child.seconds)
        _keep(state, place, run, row)
        place.trim(child.directory, weights=limits.keep_weights)
        child.forget_legs()
        return row
    if child.stopped or status in (130, 143):  # it saved and ended, as somebody asked
        child.remember_leg()
        state.left += 1
        return None
    failure = explain_failure(status, child.said())
    if failure.kind == OUT_OF_MEMORY and child.at_once > 1 and run.key not in state.alone:
        state.alone.add(run.key)
        state.waiting.append(run)
        return None
    if failure.kind == KILLED and can_resume(child.directory):
        child.remember_leg()  # it was well until then
        again = f"{failure.message}; --retry-failed goes on from what it saved"
        failure = Failure(KILLED, again)
    else:
        child.forget_legs()
        place.trim(child.directory, weights=False)
    row = failed_row(run, failure, at_once=child.most_at_once, wall=child.seconds)
    _keep(state, place, run, row)
    return row


def _keep(state: State, place: Place, run: PlannedRun, row: Row) -> None:
    append_row(place.rows, row)
    state.rows[run.key] = row
    state.forecast.learn(row)
    state.alone.discard(run.key)


def thread_environment(jobs: int) -> None:
    """Share the processor among the runs, unless somebody has already.

    Changes the environment of this process, which its runs inherit.
    """
    if jobs > 1:
        share = max(1, (os.cpu_count() or 1) // jobs)
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
