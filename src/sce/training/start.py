"""Going on from another run: its weights and optimizer state, for its items and those of new data.

Items are the same where their ids are. Rows of known items are carried over as they are, with the
optimizer's state of each, also of those without an event in the new data; so is everything that is
not of items. A new item begins as the mean of the known items near it in the training sequences;
without any, as the mean of all that were carried over. Its optimizer state is that of an item which
no batch has touched yet: zeros.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sce.data.popular import count_items
from sce.data.prepared import PreparedDataset, Sequences
from sce.distributed.checkpoint import LATEST, read_whole
from sce.errors import InputError, TrainingWarning, checked, named
from sce.training.checkpoint import FORMAT, VERSION, Trained, read_tensors, with_prefix
from sce.training.describe import CODE, describe_model, name_model
from sce.training.run import MANIFEST, Run, read_weights, warn_of
from sce.training.settings import TrainingSettings
from sce.units import plural

WINDOW = 5  # events before and after a new item, among which its neighbours are
_EVENTS = 1 << 14  # looked at together
_CATALOGUE = "model.catalogue"


@dataclass(frozen=True, eq=False)
class Start:
    """What training begins with, if not with new weights."""

    summary: dict[str, Any]  # for run.json: see `tell_start`
    tensors: dict[str, Tensor] = field(default_factory=dict)  # as `Trained.tensors` names them
    scalars: dict[str, Any] = field(default_factory=dict)

    def give(self, trained: Trained) -> None:
        """Give weights and optimizer state to what is to be trained, and keep none of them."""
        if not self.tensors:
            return  # there is a checkpoint, from which training goes on
        if (table := trained.table) is not None:
            own = slice(table.ranks.rank, None, table.ranks.size)
            table.shard.data.copy_(self.tensors.pop(_CATALOGUE)[own])
            sums = self.tensors.pop(f"optimizer.sum.{_CATALOGUE}", None)
            if sums is not None:
                trained.optimizer.state[table.shard]["sum"].copy_(sums[own])
        trained.restore({**trained.modules.state_dict(), **self.tensors}, self.scalars)
        self.tensors.clear()


@checked
def unite_items(dataset: PreparedDataset, path: Path | str) -> PreparedDataset:
    """A dataset in a catalogue that has all items of a run too, to go on from it or to resume it.

    >>> dataset = unite_items(dataset, "old")                                    # doctest: +SKIP
    >>> fit(SASRec(dataset.n_items), loss, dataset, start_from="old")            # doctest: +SKIP

    Args:
        dataset: The dataset to train on.
        path: The run. Items that only it has keep its titles; all do, if the dataset has none.
    """
    run = Run.open(path)
    return dataset.unite(run.item_ids, run.titles)


def choose_start(
    path: Path | str | None,
    begun: Mapping[str, Any],
    model: nn.Module,
    dataset: PreparedDataset,
    settings: TrainingSettings,
    out: Path | str | None = None,
) -> Start | None:
    """What training begins with: of the run at `path`, or of that which the resumed one began with.

    `begun` says of the resumed run, if there is one, its "start" and whether it is "saved".
    """
    known = begun.get("start")
    given, there = (one and Path(one).resolve() for one in (path, out))
    if given and given == there and not begun:
        raise InputError(f"{path} cannot be gone on from and be replaced: choose another directory")
    if begun and given and (known or {}).get("run") != str(given):
        was = f"from {known['run']}" if known else "with new weights"
        raise InputError(f"the run to resume was begun {was}, not from {path}: give what it had")
    if begun and (known is None or begun["saved"]):
        return Start(known) if known else None
    source = path or (known or {}).get("run")
    if source is None:
        return None
    found = read_start(Path(source), model, dataset, settings)
    if known is not None and found.summary != known:
        raise InputError(
            f"{known['run']} has changed since the run was begun, of which nothing was saved yet; "
            f"begin anew with {named('force', True)}"
        )
    return found


def read_start(
    path: Path, model: nn.Module, dataset: PreparedDataset, settings: TrainingSettings
) -> Start:
    """Read the best weights of a run and its optimizer state, for the items of a dataset."""
    run = Run.open(path)
    _check_model(run, model)
    weights = {f"model.{name}": tensor for name, tensor in read_weights(run).items()}
    tables = _tables(run, model, weights)
    warn_of(run)
    sources = run.item_ids.lookup_all(dataset.item_ids)
    known = sources >= 0
    seen = count_items(dataset.train.items, dataset.n_items) > 0
    if not known[seen].any():
        raise InputError(
            f"none of the {plural(int(seen.sum()), 'item')} of {dataset.path} is among those of "
            f"{path}: nothing can be carried over; ids that mean the same must be written the same"
        )
    if lacking := len(run.item_ids) - int(known.sum()):
        raise InputError(
            f"{path} has {plural(lacking, 'item')} that the dataset lacks, and all are kept: give "
            f"sce.unite_items(dataset, {str(path)!r}), and a model for its n_items"
        )
    now, before = len(dataset.train.items), 0 if run.popularity is None else run.popularity.sum()
    if 2 * now < before:
        warnings.warn(
            f"{dataset.path} has {plural(now, 'event')} to train on, and {path} had {before:,}: is "
            "it the whole log, old events included? Only users in it are recommended for",
            TrainingWarning,
            stacklevel=2,
        )
    state, scalars, optimizer = _optimizer_state(run, tables, settings)
    neighbours = 0
    for name in tables:
        rows = weights[name]
        new, found = mean_neighbours(dataset.train, sources, rows)
        weights[name] = place_rows(rows, sources, new)
        neighbours = int(found.sum())
    for name, tensor in state.items():
        if name.endswith(tuple(f".{table}" for table in tables)) and tensor.dim():
            state[name] = place_rows(tensor, sources)
    summary = {
        "run": str(path.resolve()),
        "identity": run.identity,
        "epoch": next((r["epoch"] for r in reversed(run.metrics()) if r.get("best")), None),
        "carried": int(known.sum()),
        "new": int((~known).sum()),
        "from_neighbours": neighbours,
        "unseen": int((known & ~seen).sum()),
        "optimizer": optimizer,
    }
    return Start(summary, weights | state, scalars)


def tell_start(start: Mapping[str, Any]) -> str:
    """What was carried over, in words."""
    epoch = "" if start["epoch"] is None else f" (epoch {start['epoch']})"
    new = f"{start['new']:,} new"
    if start["new"]:
        new += f" ({start['from_neighbours']:,} from the mean of known items near them"
        rest = start["new"] - start["from_neighbours"]
        new += f", {rest:,} from that of all)" if rest else ")"
    carried = f"{plural(start['carried'], 'item')} carried over"
    if start.get("unseen"):
        carried += f" ({start['unseen']:,} of them without an event to train on)"
    told = f"{carried}, {new}; optimizer state {start['optimizer']}"
    return f"going on from {start['run']}{epoch}: {told}"


def place_rows(rows: Tensor, sources: NDArray[np.int64], new: Tensor | None = None) -> Tensor:
    """Rows of a table by their sources; where that is -1 the `new` ones in turn, or zeros."""
    known = torch.from_numpy(sources >= 0)
    placed = rows.new_zeros(len(sources), *rows.shape[1:])
    placed[known] = rows[torch.from_numpy(sources[sources >= 0])]
    if new is not None:
        placed[~known] = new.to(rows.dtype)
    return placed


def mean_neighbours(
    sequences: Sequences, sources: NDArray[np.int64], rows: Tensor, window: int = WINDOW
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Of each new item, the mean of the known rows that are at most `window` events away.

    `sources` has by code the row of a known item, -1 of a new one. Returns vectors of the new items
    in turn, in float64, and where there was any known neighbour: others have the mean of all known.
    """
    known = sources >= 0
    places, new = np.cumsum(~known) - 1, int((~known).sum())
    sums, counts = rows.new_zeros(new, rows.shape[1], dtype=torch.float64), np.zeros(new, np.int64)
    items, offsets = sequences.items, sequences.offsets
    for first in range(0, len(items) if new else 0, _EVENTS):
        part = items[first : first + _EVENTS + window]
        if known[part].all():
            continue
        owners = np.searchsorted(offsets, np.arange(first, first + len(part)), "right")
        for shift in range(1, window + 1):
            size = max(0, min(_EVENTS, len(part) - shift))
            left, right = part[:size], part[shift : shift + size]
            together = owners[:size] == owners[shift : shift + size]
            for one, other in ((left, right), (right, left)):
                found = together & ~known[one] & known[other]
                at, chosen = places[one[found]], torch.from_numpy(sources[other[found]])
                sums.index_add_(0, torch.from_numpy(at), rows[chosen].double())
                np.add.at(counts, at, 1)
    near = counts > 0
    if not near.all():
        sums[~near] = rows[torch.from_numpy(sources[known])].mean(0, dtype=torch.float64)
    return sums / torch.from_numpy(counts.clip(min=1)).unsqueeze(1), near


def _check_model(run: Run, model: nn.Module) -> None:
    if run.model != name_model(model):
        raise InputError(f"{run.path} is of the model {run.model}, not {name_model(model)}")
    before, free = run.config["model"], ("parameters", "parts")  # which go with the items
    differ = [
        f"{named(f'model.{name}')} was {before[name]!r} and is now {now!r}"
        for name, now in describe_model(model).items()
        if before.get(name, now) != now and name not in free and CODE not in name
    ]
    if differ:
        raise InputError(
            f"going on from {run.path} is going on with its model: {'; '.join(differ)}; leave out "
            "what differs"
        )


def _tables(run: Run, model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """Names of the catalogue among the weights, which must else be those of the model."""
    parameters = model.named_parameters(remove_duplicate=False)
    tables = [f"model.{name}" for name, each in parameters if each is model.catalogue]
    if not tables:
        raise InputError(
            f"{named('from', python='start_from')} carries rows of a parameter over, and the "
            f"catalogue of {type(model).__name__} is computed"
        )
    own = {f"model.{name}": each for name, each in model.state_dict().items()}
    expected, given = (  # of a table, whether it has all items
        {n: (len(e) == items, *e.shape[1:]) if n in tables else e.shape for n, e in of.items()}
        for of, items in ((own, len(model.catalogue)), (weights, len(run.item_ids)))  # type: ignore[arg-type]
    )
    if expected != given:
        both = expected.keys() | given.keys()
        wrong = sorted(name for name in both if expected.get(name) != given.get(name))
        raise InputError(
            f"{run.path} has weights of another model: {', '.join(wrong[:3])} are missing or of "
            "another shape"
        )
    return tables


def _optimizer_state(
    run: Run, tables: list[str], settings: TrainingSettings
) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """The optimizer's state of the model's weights, and in words what was carried over of it."""
    file = run.resume_state
    if not file.exists():
        return {}, {}, f"anew: {file.relative_to(run.path)} is not there"
    if file.name == LATEST:
        sums, tensors, metadata = read_whole(file.parent, "sum")
        tensors[f"optimizer.sum.{_CATALOGUE}"] = sums
    else:
        tensors, metadata = read_tensors(file)
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        return {}, {}, f"anew: {file.name} is of another version of sce"
    if metadata.get("run") != run.identity:
        raise MANIFEST.damaged(run.path, f"{file.name} is of another run")
    told, other = "carried over", False
    state = with_prefix(tensors, "optimizer.")
    if not state:
        told = "anew: the run had none yet"
    elif any(f"sum.{table}" in state for table in tables) != settings.row_wise:
        told, other = "carried over, but of the items anew: they have another optimizer", True

    def wanted(name: str) -> bool:
        of = name.partition(".")[2]
        return of.startswith("model.") and not (other and of in tables)

    scalars = {n: value for n, value in metadata["optimizer_scalars"].items() if wanted(n)}
    return {f"optimizer.{n}": tensor for n, tensor in state.items() if wanted(n)}, scalars, told
