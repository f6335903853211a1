"""All settings of a run: those of model, loss and training, from TOML files and from flags."""

import difflib
import math
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch

from sce.data.prepared import PreparedDataset
from sce.errors import InputError, TrainingWarning, allowed, fits
from sce.losses import DEFAULT_LOSS, LOSSES, Loss, LossSettings
from sce.losses.backend import has_kernels
from sce.losses.base import TINY_DATA
from sce.models.base import Backbone, BackboneSettings
from sce.models.registry import BACKBONES, DEFAULT_BACKBONE
from sce.planning import summarize_data
from sce.training.device import resolve_device
from sce.training.optimizer import needs_sce
from sce.training.run import Run
from sce.training.settings import TrainingSettings
from sce.units import show_size

# The settings classes of each section, by the name that chooses one; training has but one.
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {name: entry.settings for name, entry in BACKBONES.items()},
    "loss": {name: entry.settings for name, entry in LOSSES.items()},
    "training": {"": TrainingSettings},
}
DEFAULT_NAMES = {"model": DEFAULT_BACKBONE, "loss": DEFAULT_LOSS, "training": ""}
EXACT_LOSS = {"loss": {"name": "ce", "chunk_size": 512}}
EXACT_ITEMS = 4096  # up to which a CPU takes it unasked, however many targets a batch has
EXACT_ITEMS_IN_HALF = 20_000  # and a GPU with the kernels, in half precision
_MEASURED = {"positions": 25_600, "dim": 64}  # up to which that was measured
_FEWEST_TARGETS = 900  # of a batch, measured on a CPU
# Of training: how long, which draw, on which machine.
_OF_ONE_RUN = {"epochs", "max_steps", "patience", "seed", "device", "shard_catalogue"}
# What goes with a setting of training, and the value of that with which it does not.
_UNDONE = {
    "row_wise": (False, "catalogue_learning_rate"),
    "schedule": ("constant", "warmup_steps"),
}
_LONGEST = 2**20  # bytes of a file of settings

Layer = Mapping[str, Mapping[str, Any]]  # by section and name, the settings that were given


@dataclass(frozen=True)
class Config:
    """All settings of a run: with the dataset they decide its result."""

    model_name: str
    model: BackboneSettings
    loss_name: str
    loss: LossSettings
    training: TrainingSettings

    def __post_init__(self) -> None:
        if self.training.row_wise and not hasattr(self.loss.build(TINY_DATA), "sparse_grad"):
            raise InputError(f"{needs_sce()}; the loss is {self.loss_name}")

    @classmethod
    def compose(cls, *layers: Layer) -> "Config":
        """Lay settings over the defaults, the later over the earlier."""
        given: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for layer in layers:
            for section, settings in layer.items():
                given[section] |= settings
        names = {s: given[s].pop("name", default) for s, default in DEFAULT_NAMES.items()}
        model, loss, training = (_make(s, names[s], given[s]) for s in SECTIONS)
        return cls(names["model"], model, names["loss"], loss, training)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Every setting by section and name, defaults included."""
        return {
            "model": {"name": self.model_name, **vars(self.model)},
            "loss": {"name": self.loss_name, **vars(self.loss)},
            "training": {**vars(self.training)},
        }

    def build(self, dataset: PreparedDataset) -> tuple[Backbone, Loss]:
        """Make the model and the loss, sized for the dataset."""
        try:
            items = 1 if self.training.shard_catalogue else dataset.n_items
            model = self.model.build(items, seed=self.training.seed)
            if self.training.shard_catalogue:  # whose rows are drawn where they will be
                with torch.device("meta"):
                    model.catalogue = self.model.build(dataset.n_items).catalogue
        except (RuntimeError, MemoryError) as error:
            raise InputError(
                f"a model of {dataset.n_items:,} items in {self.model.dim:,} dimensions does not "
                "fit into memory; choose a smaller --model.dim or --model.max-length"
            ) from error
        sizes = {"batch_size": self.training.batch_size, "max_length": self.model.max_length}
        data = summarize_data(dataset.train, dataset.n_items, **sizes, model=model)
        data = replace(data, cpu=resolve_device(self.training.device).type == "cpu")
        try:
            return model, self.loss.build(data)
        except ValueError as error:
            raise InputError(f"loss: {error}") from error


def _make(section: str, name: str, given: Mapping[str, Any]) -> Any:
    """Make the settings of a section, of the class that the name chooses."""
    for setting in given:
        having = classes_with(section, setting)
        if having and name not in having:
            raise InputError(
                f"{section}.{setting} belongs to {', '.join(having)}, and the {section} is {name}; "
                f"leave it out, or choose another {section}"
            )
    try:
        return SECTIONS[section][name](**given)
    except (TypeError, ValueError) as error:
        prefix = "" if str(error).startswith("--") else f"{section}: "
        raise InputError(f"{prefix}{error}") from error


def is_exact_faster(n_items: int, targets: float, config: Config, device: torch.device) -> bool:
    """True if `EXACT_LOSS` was seen to take less time than SCE, and hardly more memory.

    On a CPU by benchmarks/results/loss_cpu.jsonl, with 900, 6,000 and 25,600 targets in a batch: up
    to some 14,000, 9,500 and 6,000 items. (SCE scores all items for each bucket, and few targets
    have more buckets each.) On a GPU in half precision by loss_gpu.jsonl, with 6,400 and 25,600
    hidden states of 64 dimensions.
    """
    if device.type == "cpu":
        return n_items <= EXACT_ITEMS * (1 + 64 / math.sqrt(max(targets, _FEWEST_TARGETS)))
    return (
        n_items <= EXACT_ITEMS_IN_HALF
        and config.training.precision == "bf16"
        and config.training.batch_size * config.model.max_length <= _MEASURED["positions"]
        and config.model.dim <= _MEASURED["dim"]
        and has_kernels(device)
    )


def classes_with(section: str, setting: str) -> dict[str, Any]:
    """The settings classes of a section that have this setting, by name."""
    classes = SECTIONS[section].items()
    return {name: one for name, one in classes if setting in one.__dataclass_fields__}


def setting_types(section: str) -> dict[str, Any]:
    """The type of each setting in a section, of any of its classes."""
    classes = SECTIONS[section]
    found: dict[str, Any] = {} if "" in classes else {"name": Literal[tuple(classes)]}
    for settings in classes.values():
        hints = get_type_hints(settings)
        for name in (field.name for field in fields(settings)):
            found[name] = found.get(name, hints[name]) | hints[name]
    return found


def setting_names() -> set[str]:
    """The dotted names of all settings, such as "training.epochs"."""
    return {f"{section}.{name}" for section in SECTIONS for name in setting_types(section)}


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; a longer one than any of settings is refused: a device has no end."""
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise ValueError(f"it is longer than {show_size(_LONGEST)}")
        return tomllib.loads(content.decode())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # also for integers of thousands of digits
        raise InputError(f"{path} is not valid TOML: {error}") from error


def load_toml(path: Path | str) -> dict[str, dict[str, Any]]:
    """Read settings from a TOML file with the tables model, loss and training, as far as given."""
    return check_layer(read_toml(Path(path)), str(path))


def for_loss(file: Layer, options: Layer) -> tuple[Layer, list[str]]:
    """Split off a file the names of settings that the loss of the options does not have."""
    given = file.get("loss", {})
    own = given.get("name", DEFAULT_LOSS)
    name = options.get("loss", {}).get("name", own)
    if name == own:
        return file, []
    kept = {k: v for k, v in given.items() if k == "name" or name in classes_with("loss", k)}
    return {**file, "loss": kept}, [key for key in given if key not in kept]


def settings_of(path: Path, *layers: Layer) -> Layer:
    """The settings of a run, for going on with it; none of a model or loss that layers rename."""
    run, found = Run.open(path), {}
    for section, classes in SECTIONS.items():
        own = run.config[section].get("name", "")
        wished = [layer.get(section, {}).get("name", own) for layer in layers]
        if own in classes and {*wished} <= {own}:
            found[section] = _options_of(run, section, *layers)
    return found


def settings_from(path: Path, *layers: Layer) -> Layer:
    """The settings of a run, for going on from it in another: all but those in `_OF_ONE_RUN`."""
    run = Run.open(path)
    if run.model not in BACKBONES:
        raise InputError(f"the model of {path} is {run.model}, not of sce: go on from it in Python")
    if run.loss not in LOSSES and not any("name" in layer.get("loss", {}) for layer in layers):
        raise InputError(f"{path} was trained with {run.loss}: say with which --loss to go on")
    found = dict(settings_of(path, *layers))
    training = found.get("training", {})
    kept = {name: value for name, value in training.items() if name not in _OF_ONE_RUN}
    return {**found, "training": kept}


def _options_of(run: Run, section: str, *layers: Layer) -> dict[str, Any]:
    """The settings of a run that options have, too, but for what goes with one that layers undo."""
    kinds, config = setting_types(section), run.config[section]
    if config.get("reduction", "mean") != "mean":
        raise InputError(f"{run.path} was trained on no mean of its loss: do that in Python")
    place = f"{run.path}, which was trained in Python: {section}"
    found = {
        name: _convert(value, kinds[name], f"{place}.{name}")
        for name, value in config.items()
        if name in kinds and (section, value) != ("loss", "auto")  # as None, for options
    }
    for setting, (value, others) in _UNDONE.items():
        if any((setting, value) in layer.get(section, {}).items() for layer in layers):
            found.pop(others, None)
    return found


def settings_like(path: Path, given: Layer, *, goes_on: bool = False) -> Layer:
    """The settings of a run that has ended, with its best epoch as the number of epochs.

    That is of no use to one that begins with new weights where the run went on from another.
    """
    run = Run.open(path)
    result = run.result()
    if result is None or result["best_epoch"] is None:
        raise InputError(f"{path} has not ended: its best epoch is not known yet")
    if run.model not in BACKBONES or run.loss not in LOSSES:
        raise InputError(
            f"{path} was trained in Python with {run.model} and {run.loss}, of which one is not of "
            "sce: train the like of it there"
        )
    layer = {section: _options_of(run, section, given) for section in SECTIONS}
    best, training = result["best_epoch"], layer["training"]
    scheduled = training.get("schedule", "constant") != "constant"
    if scheduled and best != training.get("epochs") and "epochs" not in given.get("training", {}):
        raise InputError(
            f"the learning rate of {path} was to fall over {training.get('epochs')} epochs, and "
            f"the best was {best}: over {best} it would fall faster; say how many with --epochs"
        )
    asked = {"epochs", "max_steps"} & {*given.get("training", {})}
    if not asked and "start" in run.config and not (goes_on and best):
        what = "went on from another run" if best else "was best as it began, by another run"
        raise InputError(f"{path} {what}: say how long to train the like of it with --epochs")
    if best == result["epochs"] and not asked:
        what = f"the best epoch of {path}, {best}, was its last"
        if result.get("stopped") == "max_steps":
            raise InputError(
                f"{what}, which --training.max-steps {training.get('max_steps')} ended; say how "
                "long to train with that, or with --epochs"
            )
        if result["test"] is not None:
            advice = "longer training may do better; say how long with --epochs"
            warnings.warn(f"{what}: {advice}", TrainingWarning, stacklevel=2)
    epochs = training["epochs"] if asked == {"max_steps"} else best
    training |= {"epochs": epochs, "patience": 0, "max_steps": None}
    return layer


def check_layer(content: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Check the settings of a TOML file, and convert each to its type; `where` is for messages."""
    layer: dict[str, dict[str, Any]] = {}
    for section, given in content.items():
        if section not in SECTIONS:
            raise InputError(f"{where}: {section} is unknown; {_nearest_of_all(section, SECTIONS)}")
        if not isinstance(given, Mapping):
            raise InputError(f"{where}: {section} is a table of settings; write [{section}]")
        layer[section], kinds = {}, setting_types(section)
        for name, value in given.items():
            place = f"{where}: [{section}] {name}"
            if name not in kinds:
                raise InputError(f"{place} is unknown; {_nearest_of_all(name, kinds)}")
            layer[section][name] = _convert(value, kinds[name], place)
    return layer


def nearest(given: str, known: Iterable[str]) -> str:
    """Name the valid key that was perhaps meant, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    return f"the nearest valid key is {close[0]}" if close else f"valid keys are {', '.join(known)}"


def _nearest_of_all(given: str, known: Iterable[str]) -> str:
    """Name the nearest table, or the nearest key of any table; else those that are known."""
    places = {name: f"{name} in [{s}]" for s in SECTIONS for name in setting_types(s)}
    places |= {section: f"[{section}]" for section in SECTIONS}
    close = difflib.get_close_matches(given, places, n=1, cutoff=0.6)
    return f"the nearest valid key is {places[close[0]]}" if close else nearest(given, known)


def _convert(value: Any, kind: Any, place: str) -> Any:
    """A value as the settings have it: lists as tuples, 1 as 1.0 where any number may be."""
    kinds, listed = get_args(kind) or (kind,), isinstance(value, list)
    values = tuple(value) if listed else (value,)
    if float in kinds and int not in kinds:
        values = tuple(float(one) if fits(one, int) else one for one in values)
    found = values if listed else values[0]
    if not fits(found, kind):
        raise InputError(f"{place} must be {allowed(kind)}; got {value!r}")
    return found
