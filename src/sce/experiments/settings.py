"""The settings file of a sweep.

    title = "Pareto fronts"
    seeds = [0, 1, 2]

    [base]                                  # settings of sce train, for all runs
    model.dropout = 0.3

    [datasets.beauty]                       # over base, for the dataset of this name
    model.dropout = 0.6

    [datasets.made]                         # no --data: these are used, found or generated
    synthetic = { items = 20_000, users = 6_000 }

    [[grid]]                                # the product of all lists; a single value is a list
    loss.name = "sce"
    loss.bucket_size_y = [64, 256, "50% of items"]

    [[grid]]
    loss.name = ["ce-", "gbce"]
    loss.n_negatives = [64, 256]
    training.batch_size = "50% of batch"    # of that in base and datasets

    [[figures]]                             # what `sce compare` shows: see views.py
    kind = "pareto"

In `base` and `datasets`, a setting of the loss is for the losses that know it; in a grid, one that
the loss does not know is refused.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from sce.config import SECTIONS, Layer, check_layer, nearest
from sce.errors import InputError
from sce.experiments.datasets import Synthetic
from sce.experiments.views import DEFAULT_VIEWS, STEPS_VIEWS, View

_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%\s*of\s+(\w+)")
# Sizes that a grid may give as a share, and of what.
SHARES = {"loss.bucket_size_y": "items", "training.batch_size": "batch"}
Measure = Literal["training", "steps"]

_KEYS = dict.fromkeys(("title", "measure", "steps", "seeds", "base", "datasets", "grid", "figures"))
_OF_DATASET = dict.fromkeys(("path", "synthetic", *SECTIONS))


@dataclass(frozen=True)
class DatasetEntry:
    """What a settings file says about a dataset."""

    settings: Layer
    path: str | None = None
    synthetic: Synthetic | None = None


@dataclass(frozen=True)
class SweepSettings:
    """A settings file, read; values of the grids are checked when they meet their datasets."""

    name: str
    """Of the file."""
    title: str
    measure: Measure
    """Whole trainings, or a few steps without evaluation, for their memory alone."""
    steps: int
    """How many, when steps are measured."""
    seeds: tuple[int, ...]
    base: Layer
    datasets: Mapping[str, DatasetEntry]
    grids: tuple[Mapping[str, Any], ...]
    """By dotted setting, a list of values."""
    views: tuple[View, ...]


def load_sweep(path: Path) -> SweepSettings:
    """Read a settings file.

    Raises:
        InputError: When there is no such file, a key is unknown, or a value is of the wrong kind.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    except IsADirectoryError as error:
        raise InputError(f"{path} is a directory; name a settings file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error
    for key in content:
        if key not in _KEYS:
            raise InputError(f"{path}: {key} is unknown; {nearest(key, _KEYS)}")
    measure = content.get("measure", "training")
    if measure not in get_args(Measure):
        raise InputError(f"{path}: measure is one of training, steps; got {measure!r}")
    if "steps" in content and measure != "steps":
        raise InputError(f'{path}: steps belongs to measure = "steps"; leave it out')
    seeds = content.get("seeds", [0])
    if not _whole_numbers(seeds) or len(set(seeds)) < len(seeds):
        raise InputError(f"{path}: seeds are whole numbers, each once; got {seeds!r}")
    steps = content.get("steps", 40)
    if not _whole_numbers([steps]) or steps < 1:
        raise InputError(f"{path}: steps is a whole number of 1 or more; got {steps!r}")
    return SweepSettings(
        name=path.stem,
        title=str(content.get("title", path.stem)),
        measure=measure,
        steps=steps if measure == "steps" else 0,
        seeds=tuple(seeds),
        base=_no_seed(
            check_layer(_table(path, "base", content.get("base", {})), f"{path}: base"),
            f"{path}: base",
        ),
        datasets={
            name: _dataset(path, name, given)
            for name, given in _table(path, "datasets", content.get("datasets", {})).items()
        },
        grids=tuple(
            _grid(path, number, given)
            for number, given in enumerate(_tables(path, "grid", content.get("grid", [{}])), 1)
        ),
        views=_views(path, content.get("figures"), measure),
    )


def override(given: Sequence[str]) -> Layer:
    """Read KEY=VALUE pairs that go over everything else.

    Raises:
        InputError: When one is not such a pair, or names no setting.
    """
    layer: dict[str, dict[str, Any]] = {}
    for pair in given:
        dotted, equals, value = pair.partition("=")
        section, _, name = dotted.strip().partition(".")
        if not equals or not name:
            raise InputError(f"--set takes settings like training.epochs=2; got {pair!r}")
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value.strip()  # a word without its quotes
        layer.setdefault(section, {})[name] = parsed
    return _no_seed(check_layer(layer, "--set"), "--set")


def _no_seed(layer: Layer, where: str) -> Layer:
    """Seeds have a place of their own: what else fixed one would be passed over, or mix counts."""
    if "seed" in layer.get("training", {}):
        raise InputError(f"{where}: leave out training.seed; seeds = [0, 1] or --seeds 0 1 say it")
    return layer


def _dataset(path: Path, name: str, given: Any) -> DatasetEntry:
    where = f"{path}: [datasets.{name}]"
    for key in _table(path, f"datasets.{name}", given):
        if key not in _OF_DATASET:
            raise InputError(f"{where} {key} is unknown; {nearest(key, _OF_DATASET)}")
    layer = _no_seed(
        check_layer({key: given[key] for key in given if key in SECTIONS}, where), where
    )
    made, place = given.get("synthetic"), given.get("path")
    if made is not None and place is not None:
        raise InputError(f"{where} is either found at a path or synthetic: leave one out")
    if place is not None and not isinstance(place, str):
        raise InputError(f"{where} path must be a text; got {place!r}")
    if made is None:
        return DatasetEntry(layer, path=place)
    known = {entry.name: None for entry in fields(Synthetic)}
    for key in _table(path, f"datasets.{name}.synthetic", made):
        if key not in known:
            raise InputError(f"{where} synthetic.{key} is unknown; {nearest(key, known)}")
    for key in ("items", "users"):
        if key not in made:
            raise InputError(f"{where} synthetic needs {key}")
    try:
        return DatasetEntry(layer, synthetic=Synthetic(**made))
    except (TypeError, InputError) as error:
        raise InputError(f"{where} synthetic: {error}") from error


def _grid(path: Path, number: int, given: Any) -> Mapping[str, Any]:
    where = f"{path}: [[grid]] {number}"
    flat: dict[str, Any] = {}
    for section, settings in _table(path, f"grid {number}", given).items():
        if section not in SECTIONS:
            raise InputError(f"{where}: {section} is unknown; {nearest(section, SECTIONS)}")
        known = {entry.name: None for entry in fields(SECTIONS[section])}
        for name, values in _table(path, f"grid {number}, {section}", settings).items():
            if name not in known:
                raise InputError(f"{where}: {section}.{name} is unknown; {nearest(name, known)}")
            flat[f"{section}.{name}"] = values if isinstance(values, list) else [values]
            if not flat[f"{section}.{name}"]:
                raise InputError(f"{where}: {section}.{name} is an empty list")
    _no_seed(given, where)
    for dotted in SHARES:
        for size in flat.get(dotted, ()):
            if isinstance(size, str):
                try:
                    read_share(dotted, size)
                except InputError as error:
                    raise InputError(f"{where}: {error}") from error
    return flat


def read_share(dotted: str, text: str) -> float:
    """The share in a text like "50% of items", for the setting of this name.

    >>> read_share("loss.bucket_size_y", "50% of items")
    0.5

    Raises:
        InputError: When it is no such text.
    """
    found = _SHARE.fullmatch(text.strip())
    if found is None or found[2] != SHARES[dotted] or not 0 < float(found[1]) <= 100:
        raise InputError(
            f"{dotted.partition('.')[2]} is a whole number, or a share above 0 and up to 100, like "
            f"'50% of {SHARES[dotted]}'; got {text!r}"
        )
    return float(found[1]) / 100


def _views(path: Path, given: Any, measure: Measure) -> tuple[View, ...]:
    if given is None:
        return STEPS_VIEWS if measure == "steps" else DEFAULT_VIEWS
    try:
        return tuple(View.read(one) for one in _tables(path, "figures", given))
    except InputError as error:
        raise InputError(f"{path}: [[figures]]: {error}") from error


def _table(path: Path, name: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InputError(f"{path}: {name} is a table; write [{name}]")
    return given


def _tables(path: Path, name: str, given: Any) -> list[Any]:
    if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
        raise InputError(f"{path}: {name} is a list of tables; write [[{name}]]")
    if name == "grid" and not given:
        raise InputError(f"{path}: grid is empty: there is nothing to run; write [[grid]]")
    return given


def _whole_numbers(values: Any) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(type(value) is int and value >= 0 for value in values)
    )
