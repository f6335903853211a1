"""`sce sweep`: many trainings, each in a process of its own, from files of settings."""

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sce.errors import InputError
from sce.experiments.child import can_resume
from sce.experiments.display import SweepDisplay
from sce.experiments.place import Place, Sweep
from sce.experiments.plan import PlannedRun, join, make_plan, open_datasets
from sce.experiments.rows import FAILED, FINISHED, Row, read_rows
from sce.experiments.settings import load_sweep, override
from sce.experiments.state import Limits, State
from sce.experiments.sweep import run_sweep, thread_environment
from sce.planning import parse_size
from sce.units import parse_duration, plural, show_duration

_FLAG = Annotated[bool, Parameter(show_default=False)]
_SEVERAL = Parameter(consume_multiple=True)
_PATIENCE = 15.0  # seconds that runs of an earlier sweep get to save
_NOTHING = 1  # exit code: no run finished
_LEFT = 3  # exit code: there is more to do
_HALF = "half-finished"
_STAGES = (FINISHED, _HALF, FAILED)


def sweep(
    *settings: Annotated[Path, Parameter(name="SETTINGS", required=True)],
    out: Path,
    data: Annotated[list[str] | None, _SEVERAL] = None,
    jobs: int = 1,
    time_budget: str | None = None,
    memory_budget: str | None = None,
    seeds: Annotated[list[int] | None, _SEVERAL] = None,
    over: Annotated[list[str] | None, Parameter(name="--set", consume_multiple=True)] = None,
    retry_failed: _FLAG = False,
    keep_weights: _FLAG = False,
    dry_run: _FLAG = False,
) -> int:
    """Train with every combination of settings, each in a fresh process, and keep a row of each.

    The same command goes on where a sweep was stopped, interrupted or killed. Sweeps into one
    directory share the runs they have in common. Exit codes: 0 when all is done, 1 when no run
    finished, 3 when there is more to do, and as usual after a signal.

    Args:
        settings: TOML files (see experiments/README.md), in one go: runs of the first start first.
        out: Directory of the sweep; the same command goes on where it was stopped or killed.
        data: Prepared datasets to run on, as PATH or NAME=PATH. [default: those of each file]
        jobs: Runs at once on the one device. Their times are then not those of a run alone.
        time_budget: Such as 90s, 10m, 1h30m: then running ones save. Exit code 3: more is to do.
        memory_budget: Such as 40GB, for all that run at once; a run that needs more is left out.
        seeds: Instead of those of the files.
        over: Settings over all others, such as training.epochs=2.
        retry_failed: Run again what failed before. Exit code 1: no run has finished.
        keep_weights: Keep the best weights of every run; without it, its records alone.
        dry_run: List the runs, and what is done of them; run nothing, write nothing.
    """
    if jobs < 1:
        raise InputError(f"--jobs must be at least 1; got {jobs}")
    limits = Limits(
        jobs=jobs,
        seconds=None if time_budget is None else parse_duration(time_budget),
        memory_mib=None if memory_budget is None else parse_size(memory_budget) / 2**20,
        keep_weights=keep_weights,
        retry_failed=retry_failed,
    )
    wanted = [load_sweep(file) for file in settings]
    _check_apart([one.name for one in wanted])
    over_all = override(over or [])
    place = Place(out)
    place.check()
    plans = []
    for one in wanted:
        datasets = open_datasets(one, data or [], place.data, write=not dry_run)
        plans.append(make_plan(one, datasets, seeds=seeds, over=over_all))
    runs = join(plans)
    notes = dict.fromkeys(note for plan in plans for note in plan.notes)
    if dry_run:
        _list(runs, notes, place)
        return 0
    place.make()
    lock = place.lock(_PATIENCE)
    try:
        gone = 0
        for file, one, plan in zip(settings, wanted, plans, strict=True):
            keys = tuple(run.key for run in plan.runs)
            kinds = (one.views, one.measure, str(file.resolve()), plan.variant)
            gone += place.write_sweep(Sweep(one.name, one.title, keys, *kinds))
        thread_environment(jobs)
        with SweepDisplay(jobs) as display:
            if gone:
                others = plural(gone, "run")
                display.tell(f"{others} of other settings will not be compared any more; rows stay")
            for note in notes:
                display.tell(f"left out: {note}")
            state = run_sweep(runs, place, limits, display, lock=lock)
    finally:
        if lock is not None:
            os.close(lock)
    return _close(state, place, limits)


def _check_apart(names: Sequence[str]) -> None:
    """Refuse two files of one name, which a comparison could not tell apart."""
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"two of the settings files are called {name}; sweep one after another"
            )


def _list(runs: Sequence[PlannedRun], notes: Iterable[str], place: Place) -> None:
    rows = {row["key"]: row for row in read_rows(place.rows)}
    stages = [_stage(run, rows.get(run.key), place) for run in runs]
    for run, stage in zip(runs, stages, strict=True):
        made = run.dataset.prepared.path.exists()  # without content there is no key yet
        text = f"{run.key if made else 'not yet made'}  {run.label}"
        print(f"{text}: {stage}" if stage else text)
    for note in notes:
        print(f"left out: {note}")
    counts = [f"{stages.count(stage)} {stage}" for stage in _STAGES if stage in stages]
    print(", ".join([plural(len(runs), "run"), *counts]))


def _stage(run: PlannedRun, row: Row | None, place: Place) -> str | None:
    """How far a run is; None when it has not begun."""
    directory = place.runs / run.name
    if row is not None and row["status"] == FINISHED:
        return FINISHED
    if can_resume(directory):
        return _HALF
    return None if row is None else FAILED


def _close(state: State, place: Place, limits: Limits) -> int:
    words = [f"{state.count(FINISHED)} of {plural(state.total, 'run')} finished"]
    if state.count(FAILED):
        words.append(f"{state.count(FAILED)} failed")
    if state.left:
        words.append(f"{state.left} left for next time")
    print(f"{', '.join(words)}, in {show_duration(state.seconds)}")
    if limits.keep_weights and (bare := _without_weights(state, place)):
        runs = plural(bare, "run")
        print(f"finished before without weights: {runs}; sweep into another --out to have them")
    if place.rows.exists():
        print(f"rows: {place.rows}")
    if state.rows:
        print(f"next: sce compare {shlex.quote(str(place.path))}")
    if state.signal is not None:
        return 128 + state.signal
    if state.left:
        return _LEFT
    return 0 if state.count(FINISHED) else _NOTHING


def _without_weights(state: State, place: Place) -> int:
    """How many finished trainings have none; a few steps keep none in any case."""
    return sum(
        row["status"] == FINISHED
        and row["measure"] == "training"
        and not (place.path / row["run"] / "best.safetensors").exists()
        for row in state.rows.values()
    )
