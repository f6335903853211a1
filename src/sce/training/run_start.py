"""Starting and resuming runs: the directory is checked, locked, created."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sce import __version__
from sce.data import storage
from sce.data.items import Items
from sce.data.manifest import describe_file
from sce.data.popular import count_items
from sce.data.prepared import PreparedDataset
from sce.data.shapes import misfit
from sce.distributed.ranks import note_start
from sce.errors import InputError, TrainingWarning, named
from sce.training.describe import CODE
from sce.training.run import FILES, MANIFEST, DatasetInfo, Run
from sce.units import plural

# Settings that may change on resuming: the device, whose arithmetic may differ, how often to save,
# and the epochs (unless the schedule goes by them); after a divergence also those that may help.
_FREE = ("training.device", "training.save_minutes")
_REMEDIES = (
    "training.learning_rate",
    "training.catalogue_learning_rate",
    "training.clip_norm",
    "training.precision",
)


def check_target(
    path: Path | str, *, force: bool = False, resume: bool = False, needed: bool = False
) -> bool:
    """Refuse early to train where something is that must not be lost, or nothing that is `needed`.

    Returns True if a run is there, to be replaced or resumed.
    """
    path = Path(path)
    if force and resume:
        given = named("force", True), named("resume", True)
        raise InputError("{} replaces a run and {} goes on with it: choose one".format(*given))
    storage.check_writable(path, replaced=not resume)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        if not needed:
            return False
        names = [run.parent.name for run in path.parent.glob(f"*/{MANIFEST.file}")]
        near = get_close_matches(path.name, sorted(names), cutoff=0.0)
        raise InputError(
            f"there is nothing to resume at {path}: leave out {named('resume', True)} to begin a "
            f"run there, or mend {named('out')}{'; beside it are ' if near else ''}"
            f"{', '.join(near)}"
        )
    if not force and not resume:
        if not MANIFEST.listed(path):  # neither would help
            what = "holds other things than a run" if path.is_dir() else "is a file"
            raise InputError(f"{path} {what}; choose another directory")
        raise InputError(
            f"{path} exists; go on with {named('resume', True)}, replace it with "
            f"{named('force', True)}, or choose another directory"
        )
    files = MANIFEST.read(path)["files"]
    known = {MANIFEST.file, storage.LOCK, *files, *FILES}
    known |= {storage.partial_directory(path / name).name for name in (MANIFEST.file, *FILES)}
    others = sorted({file.name for file in path.iterdir()} - known)
    if force and others:
        raise InputError(
            f"{path} also holds {', '.join(others[:3])}{' ...' if len(others) > 3 else ''}, which "
            f"{named('force', True)} would delete; move it elsewhere first"
        )
    return True


@contextmanager
def run_target(
    path: Path | str | None,
    dataset: PreparedDataset,
    *,
    config: Mapping[str, Any],
    model: str,
    resume: bool = False,
    force: bool = False,
) -> Iterator[Callable[[Mapping[str, Any]], Run | None]]:
    """Check the directory that a training writes and, while a run is there, lock it.

    Yields a function that creates or resumes the run, once nothing else is left that can be
    refused; it is given what followed from settings and dataset. Without a path nothing is written.
    """
    if path is None:
        if resume or force:
            raise InputError("resume and force are about a run: name its directory, out")
        yield lambda _: None
        return
    path = Path(path)
    if (wrong := misfit(config, MANIFEST.shape["config"])) is not None:
        raise InputError(f"{wrong} of config is missing, or of another kind than sce writes there")
    try:
        json.dumps(config, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"config is kept as JSON, and cannot be: {error}") from error
    exists = check_target(path, force=force, resume=resume)
    with ExitStack() as locks:
        if exists:
            locks.enter_context(storage.locked(path))
        manifest = None
        if exists and resume:
            manifest = check_resumable(path, dataset, config=config, model=model)

        def open_run(derived: Mapping[str, Any]) -> Run:
            if manifest is not None:
                storage.write_json(path / MANIFEST.file, manifest)
                return Run.open(path)
            note_start(path)
            given: Any = {"config": config, "derived": derived, "model": model, "replace": exists}
            return start_run(path, dataset, **given, locks=locks)

        yield open_run


def start_run(
    path: Path,
    dataset: PreparedDataset,
    *,
    config: Mapping[str, Any],
    derived: Mapping[str, Any],
    model: str,
    replace: bool = False,
    locks: ExitStack | None = None,
) -> Run:
    """Create the directory of a run; with `locks`, it is locked before others can see it."""
    with storage.atomic_directory(path, replace=replace) as directory:
        if locks is not None:
            locks.enter_context(storage.locked(directory, place=path))
        counts = count_items(dataset.train.items, dataset.n_items)
        items = Items(dataset.item_ids, dataset.titles, counts)
        files = {file.name: describe_file(file) for file in items.write(directory)}
        about = str(dataset.path.resolve()), dataset.content_hash, dataset.n_items, dataset.split
        named_ones, unit = dataset.settings.get("columns", {}), dataset.settings.get("time_unit")
        info = DatasetInfo(*about, named_ones, dataset.times_hash, unit)
        free = (*_FREE, "training.epochs")
        fixed = {name: value for name, value in _flatten(config).items() if name not in free}
        known = {"dataset": dataset.content_hash, "model": model}
        known |= {"times": dataset.times_hash} if dataset.times_hash else {}
        manifest = {
            "sce": __version__,
            "identity": storage.json_checksum(known | fixed),
            "model": model,
            "config": dict(config),
            "derived": dict(derived),
            "dataset": asdict(info),
            "item_ids": dataset.item_ids.kind,
            "files": files,
        }
        MANIFEST.write(directory, manifest)
    return Run.open(path)


def check_resumable(
    path: Path, dataset: PreparedDataset, *, config: Mapping[str, Any], model: str
) -> dict[str, Any]:
    """Compare what is given with what the run was begun with.

    Returns the manifest to go on with, in which "before" keeps, in their order, settings that were
    changed against a divergence.
    """
    manifest = MANIFEST.read(path)
    if manifest["config"].get("added"):
        raise InputError(
            f"{path} was not trained but made by sce add-items: go on from it, into another "
            f"directory, with {named('from', path, python=f'start_from={str(path)!r}')}"
        )
    trained = DatasetInfo(**manifest["dataset"])
    dataset.check_content(trained.content_hash, trained.times, path)
    if (has := manifest["dataset"]["n_items"]) != dataset.n_items:
        raise InputError(
            f"{path} has {plural(has, 'item')}, also those of the run that it went on from, and "
            f"the dataset {dataset.n_items:,}: give sce.unite_items(dataset, {str(path)!r})"
        )
    if manifest["model"] != model:
        raise InputError(f"{path} trains {manifest['model']}, not {model}")
    before, now = _flatten(manifest["config"]), _flatten(json.loads(json.dumps(config)))
    free = {*_FREE, *(_REMEDIES if manifest.get("diverged") else ())}
    if before.get("training.schedule") == "constant":
        free.add("training.epochs")
    names = [name for name in sorted(before.keys() | now.keys()) if CODE not in name]
    changed = {name: before.get(name) for name in names if before.get(name) != now.get(name)}
    if refused := [name for name in changed if name not in free]:
        gone = [name for name in refused if name not in now]
        if gone and not {"model.name", "loss.name"} & {*refused}:
            raise InputError(
                f"{path} has settings that are none here ({', '.join(gone)}): resume it as it was "
                "begun, in Python or by that version"
            )
        told = (
            f"{named(name, python=name)} was {before.get(name)!r} and is now {now.get(name)!r}"
            for name in refused
        )
        hint = '; a loss that changes itself wants a name: fit(..., loss_name="...")'
        raise InputError(
            f"{path} cannot be resumed with other settings: {'; '.join(told)}; give those "
            f"that it was begun with{hint if any('loss._' in name for name in refused) else ''}"
        )
    for name in now.keys() & before.keys():
        if CODE in name and before[name] != now[name]:
            section = name.partition(".")[0]
            warnings.warn(
                f"{path} was begun with other code of the {section} {config[section]['name']}: "
                "unless it does the same, the result is that of neither",
                TrainingWarning,
                stacklevel=2,
            )
    if changed:
        manifest.pop("diverged", None)
    if remedies := {name: was for name, was in changed.items() if name in _REMEDIES}:
        manifest["before"] = [*manifest.get("before", ()), remedies]
    return manifest | {"config": dict(config)}


def note_divergence(run: Run, *, epoch: int, step: int) -> None:
    """Write into a run that its loss was not finite: resuming then allows remedies."""
    manifest = MANIFEST.read(run.path)
    manifest["diverged"] = {"epoch": epoch, "step": step}
    storage.write_json(run.path / MANIFEST.file, manifest)


def _flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, settings in nested.items()
        for name, value in (settings if isinstance(settings, Mapping) else {"": settings}).items()
    }
