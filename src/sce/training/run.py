"""The run: the directory that training writes, and evaluating, recommending and reporting read.

RUN/run.json            settings, dataset, versions; written first
RUN/items_*.npy         the item vocabulary: row i is the id of catalogue index i
RUN/metrics.jsonl       a record for each epoch
RUN/best.safetensors    weights of the best epoch so far
RUN/resume.safetensors  everything that training goes on from: see checkpoint.py
RUN/result.json         the outcome, once training has ended
RUN/tensorboard/        event files, when asked for
RUN/report.html         written by `sce report`
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sce.data.prepared import PreparedDataset
from sce.data.storage import digest_file, map_array
from sce.data.vocabulary import Kind, Vocabulary
from sce.errors import InputError
from sce.models.sasrec import SASRec, SASRecSettings
from sce.training.checkpoint import read_tensors

FORMAT = "sce run"
VERSION = 1
SASREC = "SASRec"  # in run.json, the model that `load_model` can build

MANIFEST = "run.json"
NO_WEIGHTS = "no_weights"  # in run.json, why the weights were taken away, if they were
# Beside run.json and the vocabulary.
FILES = ("metrics.jsonl", "best.safetensors", "resume.safetensors", "result.json", "report.html")
# What run.json must have, and of which kind.
_SHAPE: dict[str, Any] = {
    "sce": str,
    "model": str,
    "config": {"model": dict, "loss": dict},
    "derived": dict,
    "dataset": {"path": str, "content_hash": str, "n_items": int},
    "item_ids": str,
    "files": dict,
}
_FILE_SHAPE = {"bytes": int, "blake2b": str}
_WORDS = {str: "a text", int: "a whole number", dict: "an object"}


@dataclass(frozen=True)
class DatasetInfo:
    """What a run remembers of the dataset it was trained on."""

    path: str
    content_hash: str
    n_items: int


@dataclass(frozen=True, eq=False)
class Run:
    """A run on disk, opened."""

    path: Path
    config: dict[str, Any]  # "model", "loss", "training": every setting, defaults included
    derived: dict[str, Any]  # what followed from settings and dataset, such as bucket sizes
    model: str  # which class: SASREC, or one of the user's
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
            _check_file(path, name, written)
        info = DatasetInfo(**{name: manifest["dataset"][name] for name in _SHAPE["dataset"]})
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
        return str(self.config["loss"].get("name", "model"))

    @property
    def best_weights(self) -> Path:
        """The weights of the best epoch."""
        return self.path / "best.safetensors"

    @property
    def resume_state(self) -> Path:
        """What training goes on from."""
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
        try:
            found = [json.loads(line) for line in lines]
        except ValueError as error:
            raise damaged(self.path, f"{self.metrics_file.name} cannot be read") from error
        for number, record in enumerate(found, 1):
            if not isinstance(record, dict):
                what = f"{self.metrics_file.name}, line {number} is no object"
                raise damaged(self.path, what)
        return found

    def result(self) -> dict[str, Any] | None:
        """Return the outcome, or None while training has not ended."""
        if not self.result_file.is_file():
            return None
        try:
            found = json.loads(self.result_file.read_bytes())
        except ValueError as error:
            raise damaged(self.path, f"{self.result_file.name} cannot be read") from error
        if not isinstance(found, dict):
            raise damaged(self.path, f"{self.result_file.name} is no object")
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


def load_model(run: Run, device: torch.device | str = "cpu") -> SASRec:
    """Build the model of a run with its best weights, in evaluation mode.

    Raises:
        InputError: When there are no weights yet or any more, they do not fit, or the model is not
            SASRec.
    """
    if run.model != SASREC:
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
    model = SASRec(run.dataset.n_items, _model_settings(run))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise damaged(run.path, f"{run.best_weights.name} is of another model") from error
    return model.to(device).eval()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read run.json, which must be whole and of this version."""
    if not path.exists():
        raise InputError(f"{path} does not exist; make it with: sce train PREPARED --out {path}")
    if not path.is_dir():
        raise InputError(f"{path} is a file, not a run (a directory)")
    file = path / MANIFEST
    if not file.is_file():
        if any((path / name).exists() for name in FILES):
            raise damaged(path, f"{MANIFEST} is missing")
        raise InputError(f"{path} is not a run: it has no {MANIFEST}; sce train makes runs")
    try:
        manifest = json.loads(file.read_bytes())
    except ValueError as error:
        raise damaged(path, f"{MANIFEST} cannot be read") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{path} is not a run: its {MANIFEST} is of something else")
    if manifest.get("version") != VERSION:
        raise InputError(
            f"{path} has format version {manifest.get('version')}, and this sce reads version "
            f"{VERSION}; install the sce that wrote it, or train again"
        )
    _check_shape(path, manifest, _SHAPE)
    return manifest


def _check_shape(path: Path, found: Any, shape: Any, name: str = "") -> None:
    if isinstance(shape, type):
        if type(found) is not shape:
            raise damaged(path, f"{MANIFEST}: {name} must be {_WORDS[shape]}; it is {found!r}")
        return
    _check_shape(path, found, dict, name)
    for key, kind in shape.items():
        inner = f"{name}.{key}" if name else key
        if key not in found:
            raise damaged(path, f"{MANIFEST} has no {inner!r}")
        _check_shape(path, found[key], kind, inner)


def _model_settings(run: Run) -> SASRecSettings:
    """Those in run.json, each of the kind that it has in a model of ours."""
    given, usual = dict(run.config["model"]), vars(SASRecSettings())
    given.pop("name", None)
    for name, value in given.items():
        where = f"{MANIFEST}: config.model.{name}"
        if name not in usual:
            raise damaged(run.path, f"{where} is no setting of {SASREC}")
        kinds = (int, float) if type(usual[name]) is float else (type(usual[name]),)
        if type(value) not in kinds:
            raise damaged(run.path, f"{where} is {value!r}")
    try:
        return SASRecSettings(**given)
    except InputError as error:
        raise damaged(run.path, f"{MANIFEST}: config.model: {error}") from error


def _open_items(path: Path, kind: Kind, files: Iterable[str], n_items: int) -> Vocabulary:
    try:
        arrays = {Path(name).stem.removeprefix("items_"): map_array(path / name) for name in files}
        found = Vocabulary.from_arrays(kind, arrays)
    except ValueError as error:
        raise damaged(path, f"{MANIFEST}: item_ids and files: {error}") from error
    if len(found) != n_items:
        what = f"dataset.n_items is {n_items:,}, and there are {len(found):,} item ids"
        raise damaged(path, f"{MANIFEST}: {what}")
    return found


def _check_file(path: Path, name: str, written: Mapping[str, Any]) -> None:
    _check_shape(path, written, _FILE_SHAPE, f"files.{name}")
    file = path / name
    if not file.is_file():
        raise damaged(path, f"{name} is missing")
    if file.stat().st_size != written["bytes"] or digest_file(file) != written["blake2b"]:
        raise damaged(path, f"the content of {name} was altered")


def damaged(path: Path, what: str) -> InputError:
    """The error of a run that is not as it was written."""
    return InputError(
        f"{path} is half-written or altered: {what}; train again into another directory"
    )
