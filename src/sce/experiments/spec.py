"""The sweep file, and the runs that it plans; experiments/README.md describes the file.

In `base` and `datasets`, a setting of the loss is for the losses that know it; in a grid, one that
the loss does not know is refused.
"""

import itertools
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from sce.config import DEFAULT_NAMES, SECTIONS, Config, Layer, check_layer, classes_with, read_toml
from sce.data.storage import digest_bytes
from sce.errors import InputError
from sce.experiments.datasets import Dataset, DatasetEntry, Synthetic
from sce.experiments.figure_spec import DEFAULT_FIGURES, STEPS_FIGURES, FigureSpec, check_known
from sce.losses.scalable import AUTO_ITEMS, AUTO_TOUCHED
from sce.training.settings import TrainingSettings

Measure = Literal["training", "steps"]

_KEYS = ("title", "measure", "steps", "seeds", "base", "datasets", "grid", "figures")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%\s*of\s+(\w+)")
_SHARES = {"loss.bucket_size_y": "items", "training.batch_size": "batch"}
_ANY_ITEMS = 10**12  # in a catalogue that nobody has: shares of it are no plain sizes


@dataclass(frozen=True)
class SweepSpec:
    """A sweep file, read."""

    name: str  # name of the file, without its ending
    title: str
    measure: Measure  # whole trainings, or a few steps without evaluation, for their memory alone
    steps: int  # number of steps, when steps are measured
    seeds: tuple[int, ...]
    base: Layer
    datasets: Mapping[str, DatasetEntry]
    grids: tuple[Mapping[str, Sequence[Any]], ...]  # values by dotted setting
    figures: tuple[FigureSpec, ...]


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A run, whether it is done or not."""

    key: str  # follows from the settings and the content of the dataset, and from nothing else
    dataset: Dataset
    settings: Mapping[str, Any]  # every setting by its dotted name, as JSON has it
    measure: Measure = "training"
    steps: int = 0
    label: str = ""  # the settings that tell it apart from the other runs

    @property
    def name(self) -> str:
        """Name of its directory."""
        return f"{self.dataset.name}-{self.settings['loss.name']}-{self.key}"

    def to_toml(self) -> str:
        """Return the file that `sce train --config` reads."""
        given = self.settings.items()
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in given if value is not None]
        return "".join(lines)


@dataclass(frozen=True)
class Plan:
    """The runs of a sweep file, in the order they are started."""

    runs: tuple[PlannedRun, ...]
    notes: tuple[str, ...]  # parts of the file that have no effect, and why
    variant: str
    """Equal for plans that differ in nothing but datasets and seeds, however they are spelt."""


def load_sweep(path: Path) -> SweepSpec:
    """Read a sweep file."""
    content = read_toml(path)
    try:
        return _read(path.stem, content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def parse_overrides(given: Sequence[str]) -> Layer:
    """Read KEY=VALUE pairs that go over everything else."""
    layer: dict[str, dict[str, Any]] = {}
    for pair in given:
        dotted, equals, value = pair.partition("=")
        section, _, name = dotted.strip().partition(".")
        if not equals or not name:
            raise InputError(f"--set takes settings like training.epochs=2; got {pair!r}")
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except (ValueError, RecursionError):
            parsed = value.strip()  # a word without its quotes
        layer.setdefault(section, {})[name] = parsed
    return _layer(layer, "--set")


def make_plan(
    spec: SweepSpec,
    datasets: Sequence[Dataset],
    *,
    seeds: Sequence[int] | None = None,
    over: Layer | None = None,
) -> Plan:
    """Plan the runs of a sweep file on datasets, with every setting of each.

    The runs of the first seed come first, so that a sweep that is cut short has something to say
    about everything. `seeds` are instead of those in the file, the settings `over` over all others.
    """
    seeds, over = spec.seeds if seeds is None else _read_seeds(list(seeds)), over or {}
    runs: dict[str, PlannedRun] = {}
    notes: dict[str, None] = {}
    for seed, dataset in itertools.product(seeds, datasets):
        for point in _points(spec, dataset.name, dataset.n_items, seed, over):
            if isinstance(point, str):
                notes[point] = None
                continue
            how: dict[str, Any] = {"measure": spec.measure, "steps": spec.steps}
            of = dataset.content_hash, dataset.times_for(point)
            key = run_key(point, *of, **how if spec.measure != "training" else {})
            runs.setdefault(key, PlannedRun(key, dataset, point, spec.measure, spec.steps))
    if not runs:
        raise InputError(f"{spec.name}: there is nothing to run: {'; '.join(notes)}")
    for setting in over.get("loss", {}):
        if not any(f"loss.{setting}" in run.settings for run in runs.values()):
            raise InputError(f"--set loss.{setting}: no loss of {spec.name} has it")
    for name, entry in spec.datasets.items():
        absent = name not in {dataset.name for dataset in datasets}
        if absent and entry.path is None and entry.synthetic is None:
            unused = f"the settings of [datasets.{name}], as no dataset of this sweep is called so"
            notes[unused] = None
    return Plan(tuple(runs.values()), tuple(notes), _variant(spec, over))


def join_plans(plans: Iterable[Plan]) -> tuple[PlannedRun, ...]:
    """Put the runs of several plans in one line, each once, labelled by what tells them apart."""
    runs = list({run.key: run for plan in plans for run in plan.runs}.values())
    found = differing(((run.dataset.name, run.settings) for run in runs), across=True)
    labelled = []
    for run in runs:
        data, loss = run.dataset.name, run.settings["loss.name"]
        words = [
            f"{name.partition('.')[2]}={json.dumps(value)}"
            for name, value in run.settings.items()
            if (data, loss, name) in found or ("", loss, name) in found
        ]
        labelled.append(replace(run, label=" ".join([data, loss, *words])))
    return tuple(labelled)


def differing(
    runs: Iterable[tuple[str, Mapping[str, Any]]], *, across: bool
) -> list[tuple[str, str, str]]:
    """Settings that differ among runs of one dataset and loss, as dataset, loss and setting.

    With `across`, settings of a loss are compared over all datasets, and the dataset is empty.
    """
    values: dict[tuple[str, str, str], set[str]] = {}
    for dataset, settings in runs:
        for name, value in settings.items():
            data = "" if across and name.startswith("loss.") else dataset
            values.setdefault((data, settings["loss.name"], name), set()).add(json.dumps(value))
    return [key for key, seen in values.items() if len(seen) > 1]


def _read(name: str, content: Mapping[str, Any]) -> SweepSpec:
    check_known("", content, _KEYS)
    measure, steps = content.get("measure", "training"), content.get("steps", 40)
    if measure not in get_args(Measure):
        raise InputError(f"measure is one of training, steps; got {measure!r}")
    if "steps" in content and measure != "steps":
        raise InputError('steps belongs to measure = "steps"; leave it out')
    if type(steps) is not int or steps < 1:
        raise InputError(f"steps is a whole number of 1 or more; got {steps!r}")
    datasets = _table("datasets", content.get("datasets", {}))
    grids = _tables("grid", content.get("grid", [{}]))
    if not grids:
        raise InputError("grid is empty: there is nothing to run; write [[grid]]")
    figures = STEPS_FIGURES if measure == "steps" else DEFAULT_FIGURES
    if "figures" in content:
        figures = tuple(FigureSpec.read(one) for one in _tables("figures", content["figures"]))
    return SweepSpec(
        name=name,
        title=str(content.get("title", name)),
        measure=measure,
        steps=steps if measure == "steps" else 0,
        seeds=_read_seeds(content.get("seeds", [0])),
        base=_layer(_table("base", content.get("base", {})), "base"),
        datasets={one: _read_dataset(f"datasets.{one}", datasets[one]) for one in datasets},
        grids=tuple(_read_grid(f"[[grid]] {n}", given) for n, given in enumerate(grids, 1)),
        figures=figures,
    )


def _read_seeds(seeds: Any) -> tuple[int, ...]:
    whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise InputError(f"seeds are whole numbers of 0 or more, each once; got {seeds!r}")
    return tuple(seeds)


def _read_dataset(name: str, given: Any) -> DatasetEntry:
    where = f"[{name}]"
    check_known(f"{where} ", _table(name, given), ("path", "synthetic", *SECTIONS))
    layer = _layer({key: given[key] for key in given if key in SECTIONS}, where)
    path = given.get("path")
    if "synthetic" not in given:
        if path is not None and not isinstance(path, str):
            raise InputError(f"{where} path must be a text; got {path!r}")
        return DatasetEntry(layer, path=path)
    if path is not None:
        raise InputError(f"{where} is either found at a path or synthetic: leave one out")
    made = _table(f"{name}.synthetic", given["synthetic"])
    check_known(f"{where} synthetic.", made, [entry.name for entry in fields(Synthetic)])
    if missing := [key for key in ("items", "users") if key not in made]:
        raise InputError(f"{where} synthetic needs {' and '.join(missing)}")
    try:
        return DatasetEntry(layer, synthetic=Synthetic(**made))
    except (TypeError, InputError) as error:
        raise InputError(f"{where} synthetic: {error}") from error


def _read_grid(where: str, given: Mapping[str, Any]) -> dict[str, list[Any]]:
    grid: dict[str, list[Any]] = {}
    for section, settings in given.items():
        for name, values in _table(f"{section} of {where}", settings).items():
            listed = values if isinstance(values, list) else [values]
            if not listed:
                raise InputError(f"{where}: {section}.{name} is an empty list")
            grid[f"{section}.{name}"] = [_read_value(section, name, one, where) for one in listed]
    return grid


def _read_value(section: str, name: str, value: Any, where: str) -> Any:
    """Check a value of a grid; a text like "50% of items" becomes a fraction of that whole."""
    whole = _SHARES.get(f"{section}.{name}")
    if whole is None or not isinstance(value, str):
        return _layer({section: {name: value}}, where)[section][name]
    found = _SHARE.fullmatch(value.strip())
    if found is None or found[2] != whole or not 0 < float(found[1]) <= 100:
        raise InputError(
            f"{where}: {section}.{name} is a whole number, or a share above 0 and up to 100, like "
            f"'50% of {whole}'; got {value!r}"
        )
    return float(found[1]) / 100


def _layer(given: Mapping[str, Any], where: str) -> Layer:
    """Check settings; a seed among them would be passed over, or mix counts."""
    layer = check_layer(given, where)
    if "seed" in layer.get("training", {}):
        raise InputError(f"{where}: leave out training.seed; seeds = [0, 1] or --seeds 0 1 say it")
    return layer


def _table(name: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InputError(f"{name} is a table; got {given!r}")
    return given


def _tables(name: str, given: Any) -> list[Any]:
    if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
        raise InputError(f"{name} is a list of tables; write [[{name}]]")
    return given


def _points(
    spec: SweepSpec, name: str, n_items: int, seed: int, over: Layer
) -> Iterator[dict[str, Any] | str]:
    """Yield the settings of every run on the dataset of a name, or why one is left out."""
    entry = spec.datasets.get(name)
    lower = [spec.base, entry.settings if entry else {}, {"training": {"seed": seed}}]
    wholes = {"items": n_items, "batch": TrainingSettings.batch_size}
    for layer in [*lower, over]:
        wholes["batch"] = layer.get("training", {}).get("batch_size", wholes["batch"])
    for number, grid in enumerate(spec.grids, 1):
        for values in itertools.product(*grid.values()):
            # A share of the batch goes over the batch that it is a share of, and that may be --set.
            point: dict[str, dict[str, Any]] = {}
            last: dict[str, dict[str, Any]] = {}
            for dotted, value in zip(grid, values, strict=True):
                section, _, setting = dotted.partition(".")
                layer = point
                if dotted in _SHARES and isinstance(value, float):
                    layer = last if _SHARES[dotted] == "batch" else point
                    value = max(1, round(value * wholes[_SHARES[dotted]]))
                layer.setdefault(section, {})[setting] = value
            size = point.get("loss", {}).get("bucket_size_y") or 0
            if size > n_items:  # as good as the catalogue itself
                yield f"bucket_size_y {size:,} is more than the items of {name}"
                continue
            try:
                yield _resolve(lower, point, [over, last], n_items)
            except InputError as error:
                raise InputError(f"{spec.name}: [[grid]] {number}, on {name}: {error}") from error


def _resolve(
    lower: Sequence[Layer], point: Layer, upper: Sequence[Layer], n_items: int
) -> dict[str, Any]:
    """Compose layers; return every setting by its dotted name, and items in a bucket as a number.

    The point of a grid may have no setting that its loss or backbone lacks; the other layers may.
    """
    names = dict(DEFAULT_NAMES)
    for layer in [*lower, point, *upper]:
        names |= {section: given["name"] for section, given in layer.items() if "name" in given}

    def applicable(layer: Layer) -> Layer:
        return {
            section: {
                name: value
                for name, value in given.items()
                if name == "name" or names[section] in classes_with(section, name)
            }
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


def run_key(settings: Mapping[str, Any], content_hash: str, times: str, **how: Any) -> str:
    """Key of a run: from its settings and its dataset's content, and times if it uses them."""
    how |= {"times": times} if times else {}
    return _digest({"settings": settings, "dataset": content_hash, **how})


def _digest(content: Mapping[str, Any]) -> str:
    return digest_bytes(json.dumps(content, sort_keys=True).encode())[:12]
