"""The plan of a sweep: every run, with all its settings, before the first one starts."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sce.config import Config, Layer, check_layer
from sce.data.storage import digest_bytes
from sce.errors import InputError
from sce.experiments.datasets import Dataset, check_names, open_dataset, synthesize
from sce.experiments.settings import SHARES, Measure, SweepSettings, read_share
from sce.training.objective import settings_of
from sce.training.settings import TrainingSettings

SEED = "training.seed"
_ANY_ITEMS = 10**12  # in a catalogue that nobody has: shares of it are no plain sizes


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A run, whether it is done or not."""

    key: str
    """Follows from the settings and the content of the dataset, and from nothing else."""
    dataset: Dataset
    config: Config
    settings: Mapping[str, Any]
    """Every setting by its dotted name."""
    label: str
    """What is special about it among the others, in words."""
    measure: Measure = "training"
    steps: int = 0

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"{self.dataset.name}-{self.config.loss.name}-{self.key}"


@dataclass(frozen=True)
class Plan:
    """All runs of a sweep, in the order they are started."""

    runs: tuple[PlannedRun, ...]
    notes: tuple[str, ...]
    """What of the settings file has no effect, and why."""
    variant: str
    """The same for plans that differ in nothing but datasets and seeds, however they are spelt."""


def open_datasets(
    settings: SweepSettings, given: Sequence[str], place: Path, *, write: bool = True
) -> tuple[Dataset, ...]:
    """Open the datasets that are given, or else those of the settings file.

    Args:
        settings: The settings file.
        given: Paths of prepared datasets, perhaps each as NAME=PATH.
        place: Where synthetic ones are kept.
        write: Generate synthetic ones that are not there; without it they have no users.

    Raises:
        InputError: When there is none, or two have the same name or content.
    """
    if given:
        return tuple(check_names([open_dataset(one) for one in given]))
    found = []
    for name, entry in settings.datasets.items():
        if entry.synthetic is not None:
            found.append(synthesize(name, entry.synthetic, place / name, write=write))
        elif entry.path is not None:
            found.append(Dataset(name, open_dataset(entry.path).prepared))
    if not found:
        raise InputError("the settings file names no dataset; give prepared ones with --data")
    return tuple(found)


def make_plan(
    settings: SweepSettings,
    datasets: Sequence[Dataset],
    *,
    seeds: Sequence[int] | None = None,
    over: Layer | None = None,
) -> Plan:
    """Build the configuration of every run, in the way that `sce train` does.

    The runs of the first seed come first, so that a sweep that is cut short has something to say
    about everything.

    Args:
        settings: The settings file.
        datasets: To run on.
        seeds: Instead of those in the file.
        over: Settings over all others.

    Raises:
        InputError: When the settings of any run cannot be, or there is none.
    """
    seeds = settings.seeds if seeds is None else seeds
    if len(set(seeds)) < len(seeds) or any(seed < 0 for seed in seeds):
        raise InputError(f"seeds are whole numbers of 0 or more, each once; got {list(seeds)}")
    chosen: dict[str, tuple[Dataset, Config, Mapping[str, Any]]] = {}
    notes: list[str] = []
    called = {dataset.name for dataset in datasets}
    for seed in seeds:
        for dataset in datasets:
            for number, grid in enumerate(settings.grids, 1):
                where = f"{settings.name}: [[grid]] {number}"
                for point, rest in _points(
                    settings, dataset.name, grid, dataset.n_items, over or {}
                ):
                    config = _configure(settings, dataset.name, point, seed, rest, where)
                    config = config.settled(dataset.n_items, dataset.n_events)
                    size = point.get("loss", {}).get("bucket_size_y", 0)
                    if size > dataset.n_items:  # as good as the catalogue itself
                        note = f"bucket_size_y {size:,} is more than the items of {dataset.name}"
                        if note not in notes:
                            notes.append(note)
                        continue
                    flat = flatten(config)
                    chosen.setdefault(_key(flat, dataset, settings), (dataset, config, flat))
    losses = {config.loss.name for _, config, _ in chosen.values()}
    for setting in (over or {}).get("loss", {}):
        if chosen and setting != "name" and not any(setting in settings_of(one) for one in losses):
            raise InputError(f"--set loss.{setting}: no loss of {settings.name} has it")
    if not chosen:
        why = "; ".join(notes) or "there are no seeds"
        raise InputError(f"{settings.name}: there is nothing to run: {why}")
    notes += [
        f"the settings of [datasets.{name}], as no dataset of this sweep is called so"
        for name, entry in settings.datasets.items()
        if entry.path is None and entry.synthetic is None and name not in called
    ]
    labels = _labels([(dataset.name, flat) for dataset, _, flat in chosen.values()])
    runs = (
        PlannedRun(key, *what, label, settings.measure, settings.steps)
        for (key, what), label in zip(chosen.items(), labels, strict=True)
    )
    return Plan(tuple(runs), tuple(notes), _variant(settings, over or {}))


def join(plans: Sequence[Plan]) -> tuple[PlannedRun, ...]:
    """Put the runs of several plans in one line, each once, named by what tells them all apart."""
    runs = list({run.key: run for plan in plans for run in plan.runs}.values())
    labels = _labels([(run.dataset.name, run.settings) for run in runs])
    return tuple(replace(run, label=label) for run, label in zip(runs, labels, strict=True))


def flatten(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name, as JSON has it; those that another loss has are left out.

    >>> flatten(Config())["loss.alpha"]
    2.0
    """
    nested = json.loads(json.dumps(config.to_dict()))
    known = settings_of(config.loss.name) | {"name"}
    return {
        f"{section}.{name}": value
        for section, given in nested.items()
        for name, value in given.items()
        if section != "loss" or name in known
    }


def to_toml(config: Config) -> str:
    """All settings as the file that `sce train --config` reads."""
    lines = []
    for section, given in config.to_dict().items():
        lines.append(f"[{section}]")
        lines += [
            f"{name} = {json.dumps(value)}" for name, value in given.items() if value is not None
        ]
    return "\n".join(lines) + "\n"


def _points(
    settings: SweepSettings,
    name: str,
    grid: Mapping[str, Sequence[Any]],
    n_items: int,
    over: Layer,
) -> Iterator[tuple[Layer, Layer]]:
    """Every combination in a grid, on the dataset of a name, and what goes over it.

    Shares are given as sizes. What a share is of goes under it, not over it.
    """
    batch = TrainingSettings.batch_size
    for layer in [*_shared(settings, name), over]:
        batch = layer.get("training", {}).get("batch_size", batch)
    wholes = {"items": n_items, "batch": batch}
    for values in itertools.product(*grid.values()):
        point: dict[str, dict[str, Any]] = {}
        rest = over
        for dotted, value in zip(grid, values, strict=True):
            section, _, setting = dotted.partition(".")
            if dotted in SHARES and isinstance(value, str):
                value = max(1, round(read_share(dotted, value) * wholes[SHARES[dotted]]))
                if SHARES[dotted] == "batch":
                    given = over.get(section, {})
                    rest = {**rest, section: {k: v for k, v in given.items() if k != setting}}
            point.setdefault(section, {})[setting] = value
        yield point, rest


def _configure(
    settings: SweepSettings,
    name: str,
    point: Layer,
    seed: int,
    over: Layer,
    where: str,
) -> Config:
    """The configuration of a run on the dataset of a name."""
    point = check_layer(point, where)
    shared = _shared(settings, name)
    layers = [*shared, point, over]
    names = [layer["loss"]["name"] for layer in layers if "name" in layer.get("loss", {})]
    loss = names[-1] if names else Config().loss.name
    try:
        return Config.compose(
            *(_understood(layer, loss) for layer in shared),
            {"training": {"seed": seed}},
            point,
            _understood(over, loss),
        )
    except InputError as error:
        raise InputError(f"{where}, on {name}: {error}") from error


def _shared(settings: SweepSettings, name: str) -> list[Layer]:
    """What the file says of all runs, and then of those on the dataset of a name."""
    entry = settings.datasets.get(name)
    return [settings.base, *([entry.settings] if entry else ())]


def _understood(layer: Layer, loss: str) -> Layer:
    """The layer without the settings of other losses."""
    known = settings_of(loss) | {"name"}
    return {
        section: {n: v for n, v in given.items() if section != "loss" or n in known}
        for section, given in layer.items()
    }


def _key(flat: Mapping[str, Any], dataset: Dataset, settings: SweepSettings) -> str:
    content: dict[str, Any] = {"settings": flat, "dataset": dataset.content_hash}
    if settings.measure != "training":
        content |= {"measure": settings.measure, "steps": settings.steps}
    return digest_bytes(json.dumps(content, sort_keys=True).encode())[:12]


def _variant(settings: SweepSettings, over: Layer) -> str:
    """Of what the runs are like on each dataset that the file has settings for, and on any other.

    All of them count, also those that are not run on this time.
    """
    usual = _variants_on("", settings, over)
    own = {name: _variants_on(name, settings, over) for name in settings.datasets}
    content = {
        "measure": [settings.measure, settings.steps],
        "usual": usual,
        "own": {name: found for name, found in own.items() if found != usual},
    }
    return digest_bytes(json.dumps(content, sort_keys=True).encode())[:12]


def _variants_on(name: str, settings: SweepSettings, over: Layer) -> list[str]:
    """The settings of every run on the dataset of a name, whatever its size, with one seed."""
    found = set()
    for grid in settings.grids:
        for point, rest in _points(settings, name, grid, _ANY_ITEMS, over):
            try:
                config = _configure(settings, name, point, 0, rest, "")
                found.add(json.dumps(flatten(config), sort_keys=True))
            except InputError as error:  # it is not run on this time, or planning would have failed
                found.add(str(error))
    return sorted(found)


def _labels(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Name each run by its dataset, its loss, and what differs among the runs of the two.

    What a loss has otherwise on one dataset than on another counts too.
    """
    values: dict[tuple[str, str, str], set[str]] = {}

    def key(name: str, settings: Mapping[str, Any], dotted: str) -> tuple[str, str, str]:
        return "" if dotted.startswith("loss.") else name, settings["loss.name"], dotted

    for name, settings in runs:
        for dotted, value in settings.items():
            values.setdefault(key(name, settings, dotted), set()).add(json.dumps(value))
    for name, settings in runs:
        words = [name, settings["loss.name"]]
        for dotted, value in settings.items():
            if dotted != "loss.name" and len(values[key(name, settings, dotted)]) > 1:
                words.append(f"{dotted.partition('.')[2]}={json.dumps(value)}")
        yield " ".join(words)
