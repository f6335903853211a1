"""New items for a trained run, without training."""

from pathlib import Path
from typing import Any

import torch

from sce.data import storage
from sce.data.items import Items
from sce.data.manifest import describe_file
from sce.data.new_items import Grown, grow
from sce.errors import InputError
from sce.models.registry import BACKBONES
from sce.training.checkpoint import read_tensors, write_tensors
from sce.training.run import MANIFEST, Run, read_weights, warn_of
from sce.training.start import place_rows

# Of fewer items.
_OUTCOMES = ("test", "validation", "by_popularity", "popularity", "users",
             "test_ranks", "validation_ranks")  # fmt: skip


def add_items(path: Path | str, items: Path | str, out: Path | str) -> dict[str, Any]:
    """Write a run with new items beside those of another, whose vectors stay as they are.

    Args:
        path: The run.
        items: A file with a line of JSON for each new item: {"item_id": ..., "similar_to": [ids]},
            of which the mean is taken, or {"item_id": ..., "vector": [numbers]}, its content; then
            the file also has the content vectors of items of the run. A line may have a "title".
        out: The directory of the run to write, which must not be there yet.

    Returns:
        What was added: see `grow`.

    Raises:
        InputError: When the file or the run cannot be used.
    """
    path, items, out = Path(path), Path(items), Path(out)
    run = Run.open(path)
    if run.model not in BACKBONES:
        raise InputError(f"the model of {path} is {run.model}, whose item table sce does not know")
    storage.check_writable(out)
    if out.exists():
        raise InputError(f"{out} exists; choose another directory")
    weights = read_weights(run)
    warn_of(run)
    table = weights["catalogue"]
    grown = grow(Items(run.item_ids, run.titles, run.popularity), table.numpy(), items)
    rows = torch.from_numpy(grown.rows)
    with storage.atomic_directory(out) as directory:
        identity = _write_manifest(run, directory, grown)
        weights["catalogue"] = place_rows(table, grown.sources, rows)
        write_tensors(directory / run.best_weights.name, weights, {"run": identity})
        _write_state(run, directory, grown, identity)
        unknown = dict.fromkeys(("best_epoch", "epochs", "tokens_per_second"))
        result = (run.result() or unknown).items()
        kept = {name: value for name, value in result if name not in _OUTCOMES}
        storage.write_json(directory / run.result_file.name, kept)
    return grown.added


def _write_manifest(run: Run, directory: Path, grown: Grown) -> str:
    """Write run.json and its arrays; return the identity of the new run."""
    manifest = MANIFEST.read(run.path)
    files = {file.name: describe_file(file) for file in grown.items.write(directory)}
    digest = storage.digest_bytes(grown.rows.tobytes())
    identity = storage.json_checksum({"run": run.identity, "rows": digest, "files": files})
    manifest.pop("diverged", None)
    added = {"run": str(run.path.resolve()), **grown.added}
    changes = {
        "identity": identity,
        "config": {**manifest["config"], "added": added},
        "dataset": {**manifest["dataset"], "n_items": len(grown.items.ids)},
        "files": files,
    }
    MANIFEST.write(directory, manifest | changes)
    return identity


def _write_state(run: Run, directory: Path, grown: Grown, identity: str) -> None:
    """Write the optimizer's state too, for going on from the new run; of shards there is none."""
    if not run.resume_state.is_file() or run.resume_state.parent != run.path:
        return
    tensors, metadata = read_tensors(run.resume_state)
    if metadata.get("run") != run.identity:
        raise MANIFEST.damaged(run.path, f"{run.resume_state.name} is of another run")
    for name, tensor in tensors.items():
        if name.endswith("model.catalogue") and tensor.dim():
            new = None if name.startswith("optimizer.") else torch.from_numpy(grown.rows)
            tensors[name] = place_rows(tensor, grown.sources, new)
    write_tensors(directory / run.resume_state.name, tensors, metadata | {"run": identity})
