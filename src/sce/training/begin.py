"""Beginning a run: a new directory, or going on with one that is there."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sce import __version__
from sce.data.prepared import PreparedDataset
from sce.data.storage import (
    LOCK,
    atomic_directory,
    check_writable,
    digest_file,
    partial_directory,
    write_array,
    write_text,
)
from sce.errors import InputError
from sce.training.run import (
    FILES,
    FORMAT,
    MANIFEST,
    SASREC,
    VERSION,
    DatasetInfo,
    Run,
    read_manifest,
)
from sce.training.watch import DivergenceError

# What a run may be resumed with: the number of epochs (unless the schedule goes by it), and the
# device, whose arithmetic may differ; after the loss was no number, also what may help.
_DEVICE, _EPOCHS = "training.device", "training.epochs"
_REMEDIES = (
    "training.learning_rate",
    "training.catalogue_learning_rate",
    "training.clip_norm",
    "training.precision",
)


def check_target(path: Path | str, *, force: bool = False, resume: bool = False) -> bool:
    """Refuse early to train where something is that must not be lost.

    Returns:
        Whether a run is there, to be replaced or resumed.

    Raises:
        InputError: When something is there and not a run, or neither `force` nor `resume` is set.
    """
    path = Path(path)
    if force and resume:
        raise InputError("--force replaces a run and --resume goes on with it: choose one")
    check_writable(path)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return False
    if not force and not resume:
        raise InputError(
            f"{path} exists; go on with --resume, replace it with --force, or choose another "
            "directory"
        )
    files = read_manifest(path)["files"]
    known = {MANIFEST, LOCK, "tensorboard", *files, *FILES}
    known |= {partial_directory(path / name).name for name in (MANIFEST, *FILES)}
    others = sorted({file.name for file in path.iterdir()} - known)
    if force and others:
        raise InputError(
            f"{path} also holds {', '.join(others[:3])}{' ...' if len(others) > 3 else ''}, which "
            "--force would delete; move it elsewhere first"
        )
    return True


def start_run(
    path: Path | str,
    dataset: PreparedDataset,
    *,
    config: Mapping[str, Any],
    derived: Mapping[str, Any],
    model: str = SASREC,
    force: bool = False,
) -> Run:
    """Make the directory of a run, with everything that is known before training."""
    path = Path(path)
    replace = check_target(path, force=force)
    with atomic_directory(path, replace=replace) as directory:
        files = {}
        for part, array in dataset.item_ids.arrays().items():
            file = directory / f"items_{part}.npy"
            write_array(file, array)
            files[file.name] = {"bytes": file.stat().st_size, "blake2b": digest_file(file)}
        info = DatasetInfo(str(dataset.path.resolve()), dataset.content_hash, dataset.n_items)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "sce": __version__,
            "model": model,
            "config": dict(config),
            "derived": dict(derived),
            "dataset": asdict(info),
            "item_ids": dataset.item_ids.kind,
            "files": files,
        }
        (directory / MANIFEST).write_text(_pretty(manifest), encoding="utf-8")
    return Run.open(path)


def resume_run(
    path: Path | str, dataset: PreparedDataset, *, config: Mapping[str, Any], model: str = SASREC
) -> Run:
    """Open a run to go on with; the number of epochs and the device may be others.

    After `note_divergence` so may the settings that help; run.json keeps what they were under
    "before", in their order.

    Raises:
        InputError: When other settings, another model or another dataset are given than it had.
    """
    differing = check_resumable(path, dataset, config=config, model=model)
    run = Run.open(path)
    if differing:
        manifest = read_manifest(run.path)
        manifest.pop("diverged", None)
        manifest["config"] = dict(config)
        if changed := {name: was for name, was in differing.items() if name in _REMEDIES}:
            manifest["before"] = [*manifest.get("before", ()), changed]
        write_text(run.path / MANIFEST, _pretty(manifest))
        run = Run.open(path)
    return run


def check_resumable(
    path: Path | str, dataset: PreparedDataset, *, config: Mapping[str, Any], model: str = SASREC
) -> dict[str, Any]:
    """Refuse early what `resume_run` would refuse, and change nothing.

    Returns:
        The settings that are now others, by name, as they were.

    Raises:
        InputError: When other settings, another model or another dataset are given than it had.
    """
    path = Path(path)
    manifest = read_manifest(path)
    content = manifest["dataset"]["content_hash"]
    if content != dataset.content_hash:
        raise InputError(
            f"{path} was trained on a dataset with content {content[:12]}, and {dataset.path} has "
            f"content {dataset.content_hash[:12]}: resume with the former"
        )
    before, now = _flatten(manifest["config"]), _flatten(json.loads(json.dumps(config)))
    if manifest["model"] != model:
        raise InputError(f"{path} trains {manifest['model']}, not {model}")
    free = {_DEVICE, *(_REMEDIES if manifest.get("diverged") else ())}
    if before.get("training.schedule") == "constant":
        free.add(_EPOCHS)
    differing = {
        name: before.get(name)
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    }
    refused = [
        f"{name} was {was!r} and is now {now.get(name)!r}"
        for name, was in differing.items()
        if name not in free
    ]
    if refused:
        raise InputError(
            f"{path} cannot be resumed with other settings: {'; '.join(refused)}; give those "
            "that it was begun with"
        )
    return differing


def note_divergence(run: Run, error: DivergenceError) -> None:
    """Write into a run that its loss stopped being a number: `resume_run` then allows remedies."""
    manifest = read_manifest(run.path)
    manifest["diverged"] = {"epoch": error.epoch, "step": error.step}
    write_text(run.path / MANIFEST, _pretty(manifest))


def describe_divergence(run: Run) -> str | None:
    """Say where the loss of a run stopped being a number, and what to do; None where it did not.

    A run that was resumed and ended has got over it.
    """
    found = read_manifest(run.path).get("diverged")
    if not isinstance(found, Mapping) or run.result_file.exists():
        return None
    return (
        f"the training of {run.path} diverged at step {found.get('step')} of epoch "
        f"{found.get('epoch')}: try a lower --learning-rate, {way_on(run)}"
    )


def way_on(run: Run) -> str:
    """How to train on after the loss stopped being a number."""
    if run.resume_state.exists():
        return "with --resume to go on from the last good state"
    return "with --force to begin anew: there is no state to resume from yet"


def _flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, settings in nested.items()
        for name, value in (settings if isinstance(settings, Mapping) else {"": settings}).items()
    }


def _pretty(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
