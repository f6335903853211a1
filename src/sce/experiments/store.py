"""The directory of one or more sweeps, and the row of each run.

    DIR/rows.jsonl         a row for each run that came to an end
    DIR/sweeps/NAME.json   runs and figures that belong to a sweep file
    DIR/runs/NAME/         run directory of `sce train`; NAME.toml its settings, NAME.log its output
    DIR/data/NAME/         synthetic datasets
    DIR/items/             the item ids of the runs, each kept once
    DIR/.lock              held while a sweep, or a run that it left behind, is at work

Sweeps that share a directory share the runs they have in common. A row has the settings of a run,
where and how it ran, and its results: it is all that a comparison needs. Rows are added, never
changed; of two rows about one run the later counts. Rows and sweeps have checksums.
"""

import platform
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sce import __version__
from sce.data.shapes import misfit
from sce.data.storage import atomic_file, check_writable, read_json, read_json_lines, write_json
from sce.errors import InputError
from sce.experiments.figure_spec import HISTORY, FigureSpec
from sce.experiments.spec import PlannedRun, run_key
from sce.training.run import MANIFEST, NO_WEIGHTS, RESULT, Run

Row = dict[str, Any]

FINISHED, FAILED = "finished", "failed"
FORMAT, VERSION = "sce sweep", 2
_FOLDERS = ("runs", "sweeps", "items")  # that every sweep has
# Said from then on when somebody asks for the weights of a run.
_REMOVED = (
    "sce sweep removed them when the run ended, as it does without --keep-weights; to have them, "
    "sweep with it into another --out"
)
_RESULT = (
    *("best_epoch", "epochs", "stopped", "validation", "test", "users"),
    *("by_popularity", "popularity", "seconds", "memory_mib", "memory_measured", "components_mib"),
    *("tokens_per_second", "device", "test_ranks", "validation_ranks"),
)

_ROW = RESULT | {
    "key": str,
    "run": str,
    "status": str,
    "failure?": {"kind": str, "message": str},
    "measure": str,
    "dataset": {"name": str, "content_hash": str, "n_items": int, "split?": str, "times?": str},
    "seed": int,
    "settings": {"loss.name": str},
    "versions": dict,
    "history?": {"*": [int | float | None]},
}
_SWEEP = {"name": str, "title": str, "keys": [str], "figures": [dict], "measure": str, "file": str,
          "variant": str}  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """The runs and figures of a sweep file, as a comparison needs them."""

    name: str
    title: str
    keys: tuple[str, ...]  # keys of its runs
    figures: tuple[FigureSpec, ...]
    measure: str = "training"
    file: str = ""  # the sweep file; empty: not known
    variant: str = ""
    """Changes with whatever makes runs other ones, but for data and seeds; empty: not known."""


class SweepDirectory:
    """The directory, whether it exists or not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows, self.runs, self.data = path / "rows.jsonl", path / "runs", path / "data"

    def check(self) -> None:
        """Raise InputError for a directory that cannot be made, or holds something else."""
        check_writable(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file; name a directory for the sweep")
        # Others have directories called data, runs and sweeps, too.
        made = all((self.path / name).is_dir() for name in _FOLDERS)
        ours = made or self.rows.is_file() or any(self.path.glob("sweeps/*.json"))
        if self.path.is_dir() and any(self.path.iterdir()) and not ours:
            raise InputError(
                f"{self.path} holds other things than a sweep; choose another directory"
            )

    def make(self) -> None:
        """Make it, unless it exists."""
        for name in _FOLDERS:
            (self.path / name).mkdir(parents=True, exist_ok=True)

    def write_sweep(self, sweep: Sweep) -> int:
        """Remember a sweep; return how many runs are no part of it any more.

        The same settings on other data or with other seeds are added to those before.
        """
        file = self.path / "sweeps" / f"{sweep.name}.json"
        before = _read_sweep(file, figures=False) if file.exists() else replace(sweep, keys=())
        keys, gone = list(sweep.keys), 0
        if before.variant in ("", sweep.variant):
            keys = list(dict.fromkeys([*before.keys, *keys]))
        elif before.file not in ("", sweep.file):
            raise InputError(
                f"{self.path} has runs of {before.file}, with other settings under the same name; "
                "give the file another name, or choose another --out"
            )
        else:
            gone = len(set(before.keys) - set(keys))
        content = {"format": FORMAT, "version": VERSION} | asdict(sweep) | {"keys": keys}
        write_json(file, content)
        return gone

    def read_sweeps(self) -> list[Sweep]:
        """Read the sweeps of the directory, by name."""
        if not self.path.is_dir():
            what = "is a file" if self.path.exists() else "does not exist"
            raise InputError(
                f"{self.path} {what}; a directory is made by: sce sweep FILE --out ..."
            )
        files = sorted((self.path / "sweeps").glob("*.json"))
        if not files:
            parent = self.path if any(self.path.glob(f"*/{MANIFEST.file}")) else "runs"
            raise InputError(
                f"{self.path} is no run, and not of a sweep: it has no sweeps/*.json, which say "
                f"what was asked for; name the runs: sce compare {parent}/*; or write them, also "
                "beside rows that are there: sce sweep FILE --out ..."
            )
        return [_read_sweep(file) for file in files]

    def trim(self, directory: Path, *, weights: bool) -> None:
        """Make a run that ended small: no resume state, shared item ids, weights if wanted."""
        (directory / "resume.safetensors").unlink(missing_ok=True)
        shutil.rmtree(directory / "resume", ignore_errors=True)
        if weights:
            return
        best = directory / "best.safetensors"
        try:
            content = MANIFEST.read(directory)
        except InputError:
            best.unlink(missing_ok=True)  # perhaps it failed because its directory is damaged
            return
        if best.exists():
            # First: a mark too early does no harm.
            MANIFEST.write(directory, content | {NO_WEIGHTS: _REMOVED})
            best.unlink()
        for name, written in content["files"].items():
            # Runs on one dataset have the same ids: megabytes each, for a large catalogue.
            file, shared = directory / name, self.path / "items" / f"{written['blake2b']}.npy"
            with suppress(OSError, InputError):  # not every file system has links
                if not shared.exists():
                    shared.hardlink_to(file)
                elif not shared.samefile(file):
                    with atomic_file(file) as partial:
                        partial.hardlink_to(shared)


def lookup(record: Any, *keys: str) -> Any:
    """The value deep in a record; None where there is none."""
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def can_resume(directory: Path) -> bool:
    """True if a run left a state to go on from."""
    return any((directory / name).exists() for name in ("resume.safetensors", "resume"))


def read_rows(path: Path) -> list[Row]:
    """Read rows, of each run the latest; one that a crash cut off at the end is passed over."""
    rows = read_json_lines(path, _ROW) if path.is_file() else []
    return list({row["key"]: row for row in rows}.values())


def finished_row(
    run: PlannedRun, directory: Path, *, at_once: int | None, wall: float | None
) -> Row:
    """The row of a finished run: most runs `at_once`, and seconds of its process, where known."""
    if run.measure == "steps":
        found = result_of(read_json(directory / "result.json", RESULT))
    else:
        opened = Run.open(directory)
        found = result_of(opened.result() or {}, opened.metrics(), opened.derived)
    if wall is not None:
        # A run that went on after a stop knows what it did before.
        wall = max(wall, sum(value for value in (found.get("seconds") or {}).values() if value))
    return planned_row(run, FINISHED, at_once, wall) | found


def row_of(path: Path) -> Row:
    """The row of a run that `sce train` or `fit` wrote, finished or not."""
    run = Run.open(path)
    result = run.result()
    settings = {
        f"{section}.{name}": value
        for section, given in run.config.items()
        if isinstance(given, Mapping)
        for name, value in given.items()
    }
    status: Row = {"status": FINISHED}
    if result is None:
        why = "training has not ended; an interrupted run goes on with sce train --resume"
        status = {"status": FAILED, "failure": {"kind": "not ended", "message": why}}
    return {
        "key": run_key(settings, run.dataset.content_hash, run.dataset.times),
        **status,
        "measure": "training",
        "dataset": asdict(run.dataset) | {"name": Path(run.dataset.path).name},
        "seed": settings.get("training.seed", 0),
        "settings": settings,
        "versions": {"sce": run.sce_version},
        "directory": str(path),
        **result_of(result or {}, run.metrics(), run.derived),
    }


def result_of(
    result: Mapping[str, Any],
    epochs: Sequence[Mapping[str, Any]] = (),
    derived: Mapping[str, Any] | None = None,
) -> Row:
    """The part of a row that the files of a run say."""
    best = next((one for one in epochs if one.get("epoch") == result.get("best_epoch")), {})
    return {
        **{name: result[name] for name in _RESULT if name in result},
        "derived": derived or {},
        "buckets": best.get("buckets"),
        "history": _history(epochs),
    }


def planned_row(run: PlannedRun, status: str, at_once: int | None, wall: float | None) -> Row:
    """The part of a row that the sweep says."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions["sce"] = __version__
    for name in ("torch", "triton", "numpy"):
        versions[name] = None
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    told = ("name", "content_hash", "n_items", "split")
    dataset = {name: getattr(run.dataset, name) for name in told}
    dataset["times"] = run.dataset.times_for(run.settings)
    return {
        "key": run.key,
        "run": f"runs/{run.name}",
        "status": status,
        "measure": run.measure,
        "steps": run.steps or None,
        "dataset": dataset,
        "seed": run.settings["training.seed"],
        "settings": dict(run.settings),
        "at_once": at_once,
        "wall_seconds": None if wall is None else round(wall, 1),
        "versions": versions,
    }


def _history(epochs: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The course of training, column by column, in the digits that a figure can show."""
    columns = {name: [lookup(one, *keys) for one in epochs] for name, keys in HISTORY.items()}
    return {
        name: [None if value is None else float(f"{value:.5g}") for value in found]
        for name, found in columns.items()
        if set(found) != {None}
    }


def _read_sweep(file: Path, *, figures: bool = True) -> Sweep:
    content = read_json(file)
    if content.pop("format", None) != FORMAT:
        raise InputError(f"{file} is not of a sweep")
    if (found := content.pop("version", None)) != VERSION:
        raise InputError(f"{file} has version {found}; this sce reads {VERSION}")
    if (wrong := misfit(content, _SWEEP)) is not None:
        raise InputError(f"{file} was altered: {wrong} is missing, or of another kind")
    try:
        shown = tuple(FigureSpec.read(one) for one in content["figures"] if figures)
    except InputError as error:
        raise InputError(f"{file}: {error}; mend the settings file and sweep again") from error
    known = {entry.name: content[entry.name] for entry in fields(Sweep)}
    return Sweep(**known | {"figures": shown, "keys": tuple(content["keys"])})
