"""`sce sweep`: many trainings, each in a process of its own, from sweep files."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sce.cli import telling
from sce.data.storage import locked
from sce.errors import InputError
from sce.experiments.datasets import open_datasets
from sce.experiments.runner import SweepDisplay, SweepRunner
from sce.experiments.spec import PlannedRun, join_plans, load_sweep, make_plan, parse_overrides
from sce.experiments.store import FAILED, FINISHED, Sweep, SweepDirectory, can_resume, read_rows
from sce.units import parse_duration, plural, show_duration

_SEVERAL = Parameter(consume_multiple=True)
_PATIENCE = 15.0  # seconds that runs of an earlier sweep get to save
_NOTHING = 1  # exit code: no run finished
_LEFT = 3  # exit code: there is more to do
_HALF = "half-finished"


def sweep(
    *settings: Annotated[Path, Parameter(name="SETTINGS", required=True)],
    out: Path,
    data: Annotated[list[str] | None, _SEVERAL] = None,
    jobs: int = 1,
    time_budget: str | None = None,
    seeds: Annotated[list[int] | None, _SEVERAL] = None,
    over: Annotated[list[str] | None, Parameter(name="--set", consume_multiple=True)] = None,
    retry_failed: bool = False,
    keep_weights: bool = False,
    dry_run: bool = False,
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
        seeds: Instead of those of the files.
        over: Settings over all others, such as training.epochs=2.
        retry_failed: Run again what failed before. Exit code 1: no run has finished.
        keep_weights: Keep the best weights of every run; without it, its records alone.
        dry_run: List the runs, and what is done of them; run nothing, write nothing.
    """
    if jobs < 1:
        raise InputError(f"--jobs must be at least 1; got {jobs}")
    seconds = None if time_budget is None else parse_duration(time_budget)
    specs = [load_sweep(file) for file in settings]
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"two of the settings files are called {name}; sweep one after another"
            )
    overrides = parse_overrides(over or [])
    directory = SweepDirectory(out)
    directory.check()
    plans = []
    made = [one for spec in specs for one in spec.datasets.values() if one.synthetic]
    if made and not (data or dry_run):
        directory.make()  # first: whose the data are is then seen, also if we are killed meanwhile
    for spec in specs:
        datasets = open_datasets(spec.datasets, data or [], directory.data, write=not dry_run)
        plans.append(make_plan(spec, datasets, seeds=seeds, over=overrides))
    runs = join_plans(plans)
    notes = dict.fromkeys(note for plan in plans for note in plan.notes)
    if dry_run:
        _list(runs, notes, directory)
        return 0
    directory.make()
    held = locked(out, "swept into", patience=_PATIENCE, inherited=True)
    with held as lock, SweepDisplay() as display:
        gone = 0
        for file, spec, plan in zip(settings, specs, plans, strict=True):
            keys = tuple(run.key for run in plan.runs)
            kinds = (spec.figures, spec.measure, str(file.resolve()), plan.variant)
            gone += directory.write_sweep(Sweep(spec.name, spec.title, keys, *kinds))
        if gone:
            others = plural(gone, "run")
            display.print(f"sce: {others} of other settings are not compared any more; rows stay")
        for note in notes:
            display.print(f"sce: left out: {note}")
        runner = SweepRunner(
            runs,
            directory,
            jobs=jobs,
            seconds=seconds,
            keep_weights=keep_weights,
            retry_failed=retry_failed,
            lock=lock,
        )
        runner.run(display)
    with telling():
        _summarize(runner, directory)
    if runner.signal is not None:
        return 128 + runner.signal
    if runner.left:
        return _LEFT
    return 0 if runner.count(FINISHED) else _NOTHING


def _list(runs: Sequence[PlannedRun], notes: Iterable[str], directory: SweepDirectory) -> None:
    """Print the runs of a dry run, and how far each is."""
    status = {row["key"]: row["status"] for row in read_rows(directory.rows)}
    stages = []
    for run in runs:
        stage = status.get(run.key, "")
        if stage != FINISHED and can_resume(directory.runs / run.name):
            stage = _HALF
        stages.append(stage)
        key = run.key if run.dataset.path.exists() else "no key yet"  # no content, no key
        print(f"{key}  {run.label}" + (f": {stage}" if stage else ""))
    for note in notes:
        print(f"left out: {note}")
    kinds = [one for one in (FINISHED, _HALF, FAILED) if one in stages]
    print(", ".join([plural(len(runs), "run"), *(f"{stages.count(k)} {k}" for k in kinds)]))


def _summarize(runner: SweepRunner, directory: SweepDirectory) -> None:
    words = [f"{runner.count(FINISHED)} of {plural(runner.total, 'run')} finished"]
    if runner.count(FAILED):
        words.append(f"{runner.count(FAILED)} failed")
    if runner.left:
        words.append(f"{runner.left} left for next time")
    print(f"{', '.join(words)}, in {show_duration(runner.seconds)}")
    bare = sum(
        row["status"] == FINISHED
        and row["measure"] == "training"  # a few steps keep no weights in any case
        and not (directory.path / row["run"] / "best.safetensors").exists()
        for row in runner.rows.values()
    )
    if runner.keep_weights and bare:
        again = "sweep into another --out to have them"
        print(f"finished before without weights: {plural(bare, 'run')}; {again}")
    if directory.rows.exists():
        print(f"rows: {directory.rows}")
    if runner.rows:
        print(f"next: sce compare {shlex.quote(str(directory.path))}")
