"""The runs of a sweep, each with all its settings, before the first one starts."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from sce.config import Config, check_layer
from sce.data.storage import digest_bytes
from sce.errors import InputError
from sce.experiments.datasets import Dataset
from sce.experiments.spec import SECTIONS, Layer, Measure, Share, SweepSpec
from sce.losses import DEFAULT_LOSS, LOSSES
from sce.losses.scalable import AUTO_ITEMS, AUTO_TOUCHED
from sce.models.registry import BACKBONES, DEFAULT_BACKBONE
from sce.training.settings import TrainingSettings

_ANY_ITEMS = 10**12  # in a catalogue that nobody has: shares of it are no plain sizes


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A run, whether it is done or not."""

    key: str
    """Follows from the settings and the content of the dataset, and from nothing else."""
    dataset: Dataset
    settings: Mapping[str, Any]
    """Every setting by its dotted name, as JSON has it."""
    measure: Measure = "training"
    steps: int = 0
    label: str = ""
    """The settings that tell it apart from the other runs."""

    @property
    def name(self) -> str:
        """Name of its directory."""
        return f"{self.dataset.name}-{self.settings['loss.name']}-{self.key}"

    def to_toml(self) -> str:
        """Return the file that `sce train --config` reads."""
        lines = []
        for section in SECTIONS:
            lines.append(f"[{section}]")
            for dotted, value in self.settings.items():
                if dotted.startswith(f"{section}.") and value is not None:
                    lines.append(f"{dotted.partition('.')[2]} = {json.dumps(value)}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Plan:
    """The runs of a sweep file, in the order they are started."""

    runs: tuple[PlannedRun, ...]
    notes: tuple[str, ...]
    """Parts of the file that have no effect, and why."""
    variant: str
    """Equal for plans that differ in nothing but datasets and seeds, however they are spelt."""


def make_plan(
    spec: SweepSpec,
    datasets: Sequence[Dataset],
    *,
    seeds: Sequence[int] | None = None,
    over: Layer | None = None,
) -> Plan:
    """Plan the runs of a sweep file, with every setting of each.

    The runs of the first seed come first, so that a sweep that is cut short has something to say
    about everything.

    Args:
        spec: The sweep file.
        datasets: To run on.
        seeds: Instead of those in the file.
        over: Settings over all others.

    Raises:
        InputError: When the settings of any run cannot be, or there is none.
    """
    seeds, over = spec.seeds if seeds is None else seeds, over or {}
    if len(set(seeds)) < len(seeds) or any(seed < 0 for seed in seeds):
        raise InputError(f"seeds are whole numbers of 0 or more, each once; got {list(seeds)}")
    runs: dict[str, PlannedRun] = {}
    notes: dict[str, None] = {}
    for seed, dataset in itertools.product(seeds, datasets):
        for point in _points(spec, dataset.name, dataset.n_items, seed, over):
            if isinstance(point, str):
                notes[point] = None
                continue
            key = _key(point, dataset, spec)
            runs.setdefault(key, PlannedRun(key, dataset, point, spec.measure, spec.steps))
    if not runs:
        why = "; ".join(notes) or "there are no seeds"
        raise InputError(f"{spec.name}: there is nothing to run: {why}")
    for setting in over.get("loss", {}):
        if not any(f"loss.{setting}" in run.settings for run in runs.values()):
            raise InputError(f"--set loss.{setting}: no loss of {spec.name} has it")
    for name, entry in spec.datasets.items():
        absent = name not in {dataset.name for dataset in datasets}
        if absent and entry.path is None and entry.synthetic is None:
            notes[
                f"the settings of [datasets.{name}], as no dataset of this sweep is called so"
            ] = None
    return Plan(tuple(runs.values()), tuple(notes), _variant(spec, over))


def join_plans(plans: Iterable[Plan]) -> tuple[PlannedRun, ...]:
    """Put the runs of several plans in one line, each once, labelled by what tells them apart.

    A label has the dataset, the loss, and the settings that differ among the runs of the two; what
    a loss has otherwise on one dataset than on another counts too.
    """
    runs = list({run.key: run for plan in plans for run in plan.runs}.values())
    values: dict[tuple[str, str, str], set[str]] = {}

    def group(run: PlannedRun, dotted: str) -> tuple[str, str, str]:
        name = "" if dotted.startswith("loss.") else run.dataset.name
        return name, run.settings["loss.name"], dotted

    for run in runs:
        for dotted, value in run.settings.items():
            values.setdefault(group(run, dotted), set()).add(json.dumps(value))
    labelled = []
    for run in runs:
        words = [run.dataset.name, run.settings["loss.name"]]
        for dotted, value in run.settings.items():
            if dotted != "loss.name" and len(values[group(run, dotted)]) > 1:
                words.append(f"{dotted.partition('.')[2]}={json.dumps(value)}")
        labelled.append(replace(run, label=" ".join(words)))
    return tuple(labelled)


def _points(
    spec: SweepSpec, name: str, n_items: int, seed: int, over: Layer
) -> Iterator[dict[str, Any] | str]:
    """Yield the settings of every run on the dataset of a name, or why one is left out."""
    entry = spec.datasets.get(name)
    shared = [spec.base, *([entry.settings] if entry else ())]
    batch = TrainingSettings.batch_size
    for layer in [*shared, over]:
        batch = layer.get("training", {}).get("batch_size", batch)
    wholes = {"items": n_items, "batch": batch}
    for number, grid in enumerate(spec.grids, 1):
        where = f"{spec.name}: [[grid]] {number}"
        for values in itertools.product(*grid.values()):
            # A share of the batch goes over the batch that it is a share of, and that may be --set.
            point: dict[str, dict[str, Any]] = {}
            last: dict[str, dict[str, Any]] = {}
            for dotted, value in zip(grid, values, strict=True):
                section, _, setting = dotted.partition(".")
                layer = point
                if isinstance(value, Share):
                    layer = last if value.of == "batch" else point
                    value = max(1, round(value.fraction * wholes[value.of]))
                layer.setdefault(section, {})[setting] = value
            size = point.get("loss", {}).get("bucket_size_y", 0)
            if isinstance(size, int) and size > n_items:  # as good as the catalogue itself
                yield f"bucket_size_y {size:,} is more than the items of {name}"
                continue
            point = check_layer(point, where)
            lower = [*shared, {"training": {"seed": seed}}]
            try:
                yield _resolve(lower, point, [over, last], n_items)
            except InputError as error:
                raise InputError(f"{where}, on {name}: {error}") from error


def _resolve(
    lower: Sequence[Layer], point: Layer, upper: Sequence[Layer], n_items: int
) -> dict[str, Any]:
    """Compose layers; return every setting by its dotted name, and items in a bucket as a number.

    The point of a grid may have no setting that its loss or backbone lacks; the other layers may.
    """
    names = {"loss": DEFAULT_LOSS, "model": DEFAULT_BACKBONE}
    for layer in [*lower, point, *upper]:
        names |= {part: layer[part]["name"] for part in names if "name" in layer.get(part, {})}
    known = {
        "loss": {"name", *get_type_hints(LOSSES[names["loss"]].settings)},
        "model": {"name", *get_type_hints(BACKBONES[names["model"]].settings)},
    }

    def applicable(layer: Layer) -> Layer:
        return {
            section: {k: v for k, v in given.items() if k in known.get(section, given)}
            for section, given in layer.items()
        }

    config = Config.compose(*map(applicable, lower), point, *map(applicable, upper))
    flat = {
        f"{section}.{name}": value
        for section, given in json.loads(json.dumps(config.to_dict())).items()
        for name, value in given.items()
    }
    if "loss.bucket_size_y" in flat:
        auto = AUTO_TOUCHED if flat["training.row_wise"] else AUTO_ITEMS
        flat["loss.bucket_size_y"] = min(flat["loss.bucket_size_y"] or auto, n_items)
    return flat


def _key(settings: Mapping[str, Any], dataset: Dataset, spec: SweepSpec) -> str:
    content: dict[str, Any] = {"settings": settings, "dataset": dataset.content_hash}
    if spec.measure != "training":
        content |= {"measure": spec.measure, "steps": spec.steps}
    return _digest(content)


def _variant(spec: SweepSpec, over: Layer) -> str:
    """Digest the settings of all runs, on each dataset that the file has some for and on any other.

    All of them count, also those that are not run on this time.
    """
    found: dict[str, list[str]] = {}
    for name in ("", *spec.datasets):
        try:
            points = _points(spec, name, _ANY_ITEMS, 0, over)
            found[name] = sorted({json.dumps(point, sort_keys=True) for point in points})
        except InputError as error:  # it is not run on this time, or planning would have failed
            found[name] = [str(error)]
    own = {name: points for name, points in found.items() if points != found[""]}
    return _digest({"measure": [spec.measure, spec.steps], "usual": found[""], "own": own})


def _digest(content: Mapping[str, Any]) -> str:
    return digest_bytes(json.dumps(content, sort_keys=True).encode())[:12]
