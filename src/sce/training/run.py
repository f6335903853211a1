"""The run directory, as evaluating, recommending and reporting read it.

RUN/run.json            settings, dataset, versions; written first
RUN/items_*.npy         the item vocabulary: row i is the id of catalogue index i
RUN/metrics.jsonl       a record for each epoch
RUN/best.safetensors    weights of the best epoch so far
RUN/resume.safetensors  the checkpoint to resume from: see checkpoint.py
RUN/result.json         the outcome, once training has ended
RUN/report.html         written by `sce report`
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sce.data.prepared import PreparedDataset
from sce.data.storage import Manifest, map_array, write_text
from sce.data.vocabulary import Kind, Vocabulary
from sce.errors import InputError, named
from sce.models.base import Backbone, BackboneSettings
from sce.models.registry import BACKBONES
from sce.training.checkpoint import read_tensors

# Beside run.json and the vocabulary.
FILES = ("metrics.jsonl", "best.safetensors", "resume.safetensors", "result.json", "report.html")
MANIFEST = Manifest(
    file="run.json",
    format="sce run",
    version=2,
    noun="run",
    command="sce train PREPARED",
    remedy="train again into another directory",
    is_ours=FILES.__contains__,
)
NO_WEIGHTS = "no_weights"  # in run.json, why the weights were taken away, if they were
# What run.json must have, and of which type.
_SHAPE: dict[str, type] = {
    "sce": str,
    "model": str,
    "config": dict,
    "config.model": dict,
    "config.loss": dict,
    "config.loss.name": str,
    "derived": dict,
    "dataset": dict,
    "dataset.path": str,
    "dataset.content_hash": str,
    "dataset.n_items": int,
    "item_ids": str,
    "files": dict,
}


@dataclass(frozen=True)
class DatasetInfo:
    """The dataset that a run was trained on."""

    path: str
    content_hash: str
    n_items: int


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

    @classmethod
    def open(cls, path: Path | str) -> "Run":
        """Open a run, finished or not.

        Raises:
            InputError: When there is no run, or it is not as it was written.
        """
        path = Path(path)
        manifest = read_manifest(path)
        for name, written in manifest["files"].items():
            MANIFEST.check_file(path, name, written)
        info = DatasetInfo(**manifest["dataset"])
        return cls(
            path=path,
            config=manifest["config"],
            derived=manifest["derived"],
            model=manifest["model"],
            dataset=info,
            item_ids=_open_items(path, manifest["item_ids"], manifest["files"], info.n_items),
            sce_version=manifest["sce"],
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
        """The checkpoint to resume from."""
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
        if not self.metrics_file.is_file():
            return []
        # A line without its end is one that is being written, or never was to the end.
        lines = self.metrics_file.read_text(encoding="utf-8").split("\n")[:-1]
        return [self._parse(self.metrics_file, line) for line in lines]

    def result(self) -> dict[str, Any] | None:
        """Return the outcome, or None while training has not ended."""
        if not self.result_file.is_file():
            return None
        return self._parse(self.result_file, self.result_file.read_bytes())

    def write_metrics(self, history: Iterable[Mapping[str, Any]]) -> None:
        """Write the records so far, whatever was there: after a crash that may be ahead of them."""
        write_text(self.metrics_file, "".join(_line(record) for record in history))

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Add the record of an epoch."""
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(_line(record))

    def _parse(self, file: Path, text: str | bytes) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except ValueError as error:
            raise MANIFEST.damaged(self.path, f"{file.name} cannot be read") from error
        if not isinstance(found, dict):
            raise MANIFEST.damaged(self.path, f"{file.name}: {found!r} is no object")
        return found

    def load_dataset(self, path: Path | str | None = None, verify: bool = True) -> PreparedDataset:
        """Open the dataset that the run was trained on.

        Args:
            path: Where it lies now, if it was moved.
            verify: As for `PreparedDataset.load`.

        Raises:
            InputError: When it is not there, or is another one.
        """
        place = Path(path or self.dataset.path)
        if path is None and not place.exists():
            raise InputError(
                f"{self.path} was trained on {place}, which is not there; if the dataset was "
                "moved, name it with --data DIR"
            )
        dataset = PreparedDataset.load(place, verify=verify)
        if dataset.content_hash != self.dataset.content_hash:
            raise InputError(
                f"{self.path} was trained on a dataset with content "
                f"{self.dataset.content_hash[:12]}, and {place} has content "
                f"{dataset.content_hash[:12]}: not the same dataset"
            )
        return dataset


def load_model(run: Run, device: torch.device | str = "cpu") -> Backbone:
    """Build the model of a run with its best weights, in evaluation mode.

    Raises:
        InputError: When there are no weights yet or any more, they do not fit, or the model is not
            one of `BACKBONES`.
    """
    if run.model not in BACKBONES:
        raise InputError(
            f"the model of {run.path} is {run.model}, not sce's own: build it yourself and load "
            f"{run.best_weights.name} with safetensors.torch.load_model"
        )
    if not run.best_weights.is_file():
        removed = read_manifest(run.path).get(NO_WEIGHTS)
        if removed is not None and not run.resume_state.exists():
            raise InputError(f"{run.path} has no weights any more: {removed}")
        raise InputError(
            f"{run.path} has no weights yet: training was stopped before its first evaluation; "
            "go on with: sce train ... --resume"
        )
    weights, _ = read_tensors(run.best_weights)
    model = _model_settings(run).build(run.dataset.n_items)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise MANIFEST.damaged(run.path, f"{run.best_weights.name} is of another model") from error
    return model.to(device).eval()


def describe_divergence(run: Run) -> str | None:
    """A sentence about where a run diverged, and what to do; None where it did not.

    A run that was resumed and ended has got over it.
    """
    found = read_manifest(run.path).get("diverged")
    if not isinstance(found, Mapping) or run.result_file.exists():
        return None
    return (
        f"the training of {run.path} diverged at step {found.get('step')} of epoch "
        f"{found.get('epoch')}: try a lower {named('learning_rate')}, {resume_hint(run)}"
    )


def resume_hint(run: Run) -> str:
    """The way to train on after a divergence."""
    if run.resume_state.exists():
        return f"with {named('resume', True)} to go on from the last good state"
    return f"with {named('force', True)} to begin anew: there is no state to resume from yet"


def read_manifest(path: Path) -> dict[str, Any]:
    """Read run.json, which must be whole and of this version."""
    manifest = MANIFEST.read(path)
    for name, kind in _SHAPE.items():
        found: Any = manifest
        for key in name.split("."):
            found = found.get(key)
        if type(found) is not kind:
            what = f"{MANIFEST.file}: {name} must be of type {kind.__name__}; it is {found!r}"
            raise MANIFEST.damaged(path, what)
    for name, written in manifest["files"].items():
        types = isinstance(written, dict) and {key: type(v) for key, v in written.items()}
        if types != {"bytes": int, "blake2b": str}:
            raise MANIFEST.damaged(path, f"{MANIFEST.file}: files.{name} is {written!r}")
    return manifest


def _model_settings(run: Run) -> BackboneSettings:
    """The settings in run.json, each of the type that it has in the settings class."""
    kind = BACKBONES[run.model].settings
    given = {name: value for name, value in run.config["model"].items() if name != "name"}
    usual = vars(kind())
    for name, value in given.items():
        where = f"{MANIFEST.file}: config.model.{name}"
        if name not in usual:
            raise MANIFEST.damaged(run.path, f"{where} is no setting of {run.model}")
        kinds = (int, float) if type(usual[name]) is float else (type(usual[name]),)
        if type(value) not in kinds:
            raise MANIFEST.damaged(run.path, f"{where} is {value!r}")
    try:
        return kind(**given)
    except InputError as error:
        raise MANIFEST.damaged(run.path, f"{MANIFEST.file}: config.model: {error}") from error


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _open_items(path: Path, kind: Kind, files: Iterable[str], n_items: int) -> Vocabulary:
    try:
        arrays = {Path(name).stem.removeprefix("items_"): map_array(path / name) for name in files}
        found = Vocabulary.from_arrays(kind, arrays)
    except ValueError as error:
        raise MANIFEST.damaged(path, f"{MANIFEST.file}: item_ids and files: {error}") from error
    if len(found) != n_items:
        what = f"dataset.n_items is {n_items:,}, and there are {len(found):,} item ids"
        raise MANIFEST.damaged(path, f"{MANIFEST.file}: {what}")
    return found
