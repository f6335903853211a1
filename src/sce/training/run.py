"""The run directory, as evaluating, recommending and reporting read it.

RUN/run.json            settings, dataset, versions; written first
RUN/items_*.npy, titles_*.npy, popularity.npy   see sce.data.items
RUN/metrics.jsonl       a record for each epoch
RUN/best.safetensors    weights of the best epoch so far
RUN/resume.safetensors  the checkpoint to resume from: see checkpoint.py
RUN/resume              the same of a sharded catalogue: see distributed/checkpoint.py
RUN/result.json         the outcome, once training has ended
RUN/test_ranks.npy      rank of each test user's target, from 1 (0: not ranked)
RUN/validation_ranks.npy  the same of validation targets, with the weights of the best epoch
RUN/report.html         written by `sce report`
"""

import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sce.data import storage
from sce.data.columns import Columns, UnitName
from sce.data.items import Items
from sce.data.manifest import FILE, Manifest, describe_file, map_array, write_array
from sce.data.prepared import PreparedDataset
from sce.data.vocabulary import Vocabulary
from sce.distributed.checkpoint import LATEST, read_whole
from sce.errors import InputError, TrainingWarning, named
from sce.models.base import Backbone
from sce.models.registry import BACKBONES
from sce.training.checkpoint import are_finite, forms, read_tensors, with_prefix
from sce.units import plural

RANKS = "{}_ranks.npy"  # of a split
# Beside run.json and the vocabulary.
_TENSORS = ("best.safetensors", "resume.safetensors", "resume")
FILES = (
    "metrics.jsonl",
    "result.json",
    "report.html",
    *map(RANKS.format, ("validation", "test")),
    *_TENSORS,
)
START = {  # as start.py has it
    **dict.fromkeys(("run", "identity", "optimizer"), str),
    **dict.fromkeys(("carried", "new", "from_neighbours", "unseen?"), int),
    "epoch": int | None,
}
ADDED = {"run": str, "similar": int, "content": int, "error?": int | float}  # by new_items.py
MANIFEST = Manifest(
    file="run.json",
    format="sce run",
    version=3,
    noun="run",
    command="sce train PREPARED",
    remedy="train again into another directory",
    shape={
        "sce": str,
        "identity": str,
        "model": str,
        "config": {"model": dict, "loss": {"name": str}, "start?": START, "added?": ADDED},
        "derived": dict,
        "dataset": {
            "path": str,
            "content_hash": str,
            "n_items": int,
            "split?": str,
            "columns?": {role + "?": str for role in Columns._fields},
            "times?": str,
            "time_unit?": str | None,
        },
        "item_ids": str,
        "no_weights?": str,
        "diverged?": {"epoch": int, "step": int},
        "before?": list,
    },
)
_NUMBERS = {"*": int | float | None}
_METRICS = {"validation?": {"*": int | float}, "test?": {"*": int | float}}
_APART = {"by_popularity?": {"*": {"*": {"*": int | float}}}}
_MEASURED = {"seconds?": _NUMBERS, "memory_mib?": _NUMBERS, "tokens_per_second": int | float | None}
_EPOCH = {"epoch": int, "loss": int | float | None, "buckets?": _NUMBERS, **_METRICS, **_APART,
          **_MEASURED}  # fmt: skip
RESULT = {
    "best_epoch": int | None,
    "epochs": int | None,
    "users?": {"*": int},
    "popularity?": _METRICS,
    "components_mib?": _NUMBERS,
    "test_ranks?": FILE,
    "validation_ranks?": FILE,
    "start?": START,
    **_METRICS,
    **_APART,
    **_MEASURED,
}
NO_WEIGHTS = "no_weights"  # in run.json, why the weights were taken away, if they were


@dataclass(frozen=True)
class DatasetInfo:
    """The dataset that a run was trained on."""

    path: str
    content_hash: str
    n_items: int
    split: str = ""  # in words
    columns: Mapping[str, str] = field(default_factory=dict)  # of the log, that were named
    times: str = ""  # hash of the times, if the model uses them
    time_unit: UnitName | None = None  # of times that are numbers, if it was told


@dataclass(frozen=True, eq=False)
class Run:
    """A run on disk, opened."""

    path: Path
    config: dict[str, Any]  # "model", "loss" (each with a "name") and "training": every setting
    derived: dict[str, Any]  # what followed from settings and dataset, such as bucket sizes
    model: str  # its name in BACKBONES, or the class of a user's own
    dataset: DatasetInfo
    item_ids: Vocabulary
    sce_version: str  # that wrote it
    identity: str  # of its settings and dataset, which its weights have too
    titles: Vocabulary | None = None  # as those of a `PreparedDataset`
    popularity: NDArray[np.int64] | None = None  # training events of each item

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {self.model} with {self.loss} on {self.dataset.path})"

    @classmethod
    def open(cls, path: Path | str) -> "Run":
        """Open a run, finished or not."""
        path = Path(path)
        manifest, arrays = MANIFEST.open(path)
        try:
            items = Items.read(manifest["item_ids"], arrays)
            items.ids.check()
            if items.titles is not None:
                items.titles.check(titles=True)
            dataset = DatasetInfo(**manifest["dataset"])
        except (TypeError, ValueError) as error:
            raise MANIFEST.damaged(path, str(error)) from error
        if dataset.n_items != (has := len(items.ids)):
            raise MANIFEST.damaged(path, f"{dataset.n_items} items, and ids of {has}")
        return cls(
            path=path,
            config=manifest["config"],
            derived=manifest["derived"],
            model=manifest["model"],
            dataset=dataset,
            item_ids=items.ids,
            sce_version=manifest["sce"],
            identity=manifest["identity"],
            titles=items.titles,
            popularity=items.popularity,
        )

    @property
    def loss(self) -> str:
        """The name of the loss that it was trained with."""
        return str(self.config["loss"]["name"])

    @property
    def best_weights(self) -> Path:
        """The weights of the best epoch."""
        return self.path / "best.safetensors"

    @property
    def resume_state(self) -> Path:
        """The checkpoint to resume from; of a sharded catalogue, the file that names it."""
        if self.config.get("training", {}).get("shard_catalogue"):
            return self.path / "resume" / LATEST
        return self.path / "resume.safetensors"

    @property
    def metrics_file(self) -> Path:
        """A record for each epoch."""
        return self.path / "metrics.jsonl"

    @property
    def result_file(self) -> Path:
        """The outcome."""
        return self.path / "result.json"

    def metrics(self) -> list[dict[str, Any]]:
        """Return the records of the epochs so far."""
        file = self.metrics_file
        return storage.read_json_lines(file, _EPOCH) if file.is_file() else []

    def write_metrics(self, history: Iterable[Mapping[str, Any]]) -> None:
        """Write the records so far, whatever was there: after a crash that may be ahead of them."""
        storage.write_text(self.metrics_file, "".join(map(storage.json_line, history)))

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Add the record of an epoch."""
        storage.append_json_line(self.metrics_file, record)

    def result(self) -> dict[str, Any] | None:
        """Return the outcome, or None while training has not ended."""
        return storage.read_json(self.result_file, RESULT) if self.result_file.is_file() else None

    def load_dataset(self, path: Path | str | None = None, verify: bool = True) -> PreparedDataset:
        """Open the dataset that the run was trained on, which lies at `path` if it was moved."""
        place = Path(path or self.dataset.path)
        if path is None and not place.exists():
            raise InputError(
                f"{self.path} was trained on {place}, which is not there; if the dataset was "
                f"moved, name it with {named('data', 'DIR', python='path=DIR')}"
            )
        dataset = PreparedDataset.load(place, verify=verify)
        dataset.check_content(self.dataset.content_hash, self.dataset.times, self.path)
        if len(dataset.item_ids) < len(self.item_ids):  # by sce add-items, or of an earlier run
            return dataset.with_items(self.item_ids, self.titles)
        return dataset


def load_model(run: Run, device: torch.device | str = "cpu") -> Backbone:
    """Build the model of a run, one of `BACKBONES`, with its best weights, in evaluation mode."""
    if run.model not in BACKBONES:
        name = run.model.rpartition(".")[2]
        raise InputError(
            f"the model of {run.path} is {run.model}, which sce cannot build; in Python, "
            f"recommender = Recommender.load({str(run.path)!r}, model={name}(...)) can, and "
            'sce.evaluate(recommender.model, dataset, split="test") measures it'
        )
    weights = read_weights(run)
    settings = {name: value for name, value in run.config["model"].items() if name != "name"}
    try:
        entry = BACKBONES[run.model].settings(**settings)
        with torch.device("meta"):  # what altered settings ask for may be larger than any memory
            expected = entry.build(run.dataset.n_items).state_dict()
    except (TypeError, ValueError) as error:
        raise MANIFEST.damaged(run.path, f"the settings of its model: {error}") from error
    if forms(weights) != forms(expected):
        raise MANIFEST.damaged(run.path, "its weights are of another model")
    if not are_finite(weights.values()):
        raise MANIFEST.damaged(run.path, "some of its weights are not finite numbers")
    model = entry.build(run.dataset.n_items)
    model.load_state_dict(weights)
    return model.to(device).eval()


def read_weights(run: Run) -> dict[str, Tensor]:
    """The weights of the best epoch; before the first evaluation, the latest that were saved."""
    ended = run.result_file.exists()
    for file in (run.best_weights, *([] if ended else [run.resume_state])):
        if file.exists():
            if file.name == LATEST:
                rows, tensors, metadata = read_whole(file.parent)
                tensors["model.catalogue"] = rows
            else:
                tensors, metadata = read_tensors(file)
            if metadata.get("run") != run.identity:
                raise MANIFEST.damaged(run.path, f"{file.name} is of another run")
            return tensors if file == run.best_weights else with_prefix(tensors, "model.")
    if removed := MANIFEST.read(run.path).get(NO_WEIGHTS):
        raise InputError(f"{run.path} has no weights any more: {removed}")
    if ended:
        raise MANIFEST.damaged(run.path, f"{run.best_weights.name} is missing")
    raise InputError(f"{run.path} has no weights yet: nothing was saved so far; {caveat(run)}")


def caveat(run: Run) -> str | None:
    """A sentence about a run that has not ended; else None."""
    if run.result_file.exists():
        return None
    if found := MANIFEST.read(run.path).get("diverged"):
        return (
            f"the training of {run.path} diverged at step {found['step']} of epoch "
            f"{found['epoch']}: try a lower {named('learning_rate')}, {resume_hint(run)}"
        )
    if run.resume_state.is_file() and not run.best_weights.is_file():
        return (
            f"{run.path} was stopped before its first evaluation: these are its latest weights; "
            f"go on with {named('resume', True)}"
        )
    done = max((record["epoch"] for record in run.metrics()), default=0)
    return (
        f"the training of {run.path} has not ended: it is still going, or it was interrupted "
        f"({plural(done, 'epoch') if done else 'no epoch'} complete), and goes on with "
        f"{named('resume', True)}"
    )


def warn_of(run: Run) -> None:
    """Warn of a run that is not as it should be."""
    if text := caveat(run):
        warnings.warn(text, TrainingWarning, stacklevel=3)


def resume_hint(run: Run) -> str:
    """The way to train on after a divergence."""
    if run.resume_state.exists():
        return f"with {named('resume', True)} to go on from the last good state"
    return f"with {named('force', True)} to begin anew: there is no state to resume from yet"


def write_ranks(directory: Path, ranks: NDArray[np.int32], split: str = "test") -> dict[str, Any]:
    """Store the ranks of a split's targets, in the order of users; return size and digest."""
    path = directory / RANKS.format(split)
    with storage.atomic_file(path) as file:
        write_array(file, ranks)
    return describe_file(path)


def read_ranks(
    directory: Path, written: Mapping[str, Any], split: str = "test"
) -> NDArray[np.int32] | None:
    """Read ranks of this size and digest; None where they were taken away."""
    file, found = directory / RANKS.format(split), None
    if not file.is_file():
        return None
    if describe_file(file) == written:
        with suppress(ValueError), file.open("rb") as opened:
            found = map_array(opened)
    if found is None or found.dtype != np.int32 or found.ndim != 1:
        raise InputError(f"{file} was altered; without it, there is no interval over users")
    return found
