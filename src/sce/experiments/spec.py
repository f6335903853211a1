"""The sweep file.

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

    [[figures]]                             # what `sce compare` shows: see figure_spec.py
    kind = "pareto"

In `base` and `datasets`, a setting of the loss is for the losses that know it; in a grid, one that
the loss does not know is refused.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from sce.config import check_layer, nearest, setting_names
from sce.errors import InputError
from sce.experiments.datasets import DatasetEntry, Synthetic
from sce.experiments.figure_spec import DEFAULT_FIGURES, STEPS_FIGURES, FigureSpec

Layer = Mapping[str, Mapping[str, Any]]  # by section and name
Measure = Literal["training", "steps"]

SEED = "training.seed"
SECTIONS = ("model", "loss", "training")
_KEYS = ("title", "measure", "steps", "seeds", "base", "datasets", "grid", "figures")
_DATASET_KEYS = ("path", "synthetic", *SECTIONS)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%\s*of\s+(\w+)")
_NO_SEED = "leave out training.seed; seeds = [0, 1] or --seeds 0 1 say it"
_SHARES = {"loss.bucket_size_y": "items", "training.batch_size": "batch"}


class Share(NamedTuple):
    """A value of a grid like "50% of items"."""

    fraction: float
    of: str


@dataclass(frozen=True)
class SweepSpec:
    """A sweep file, read; values of its grids are checked when they meet their datasets."""

    name: str
    """Of the file, without its ending."""
    title: str
    measure: Measure
    """Whole trainings, or a few steps without evaluation, for their memory alone."""
    steps: int
    """Number of steps, when steps are measured."""
    seeds: tuple[int, ...]
    base: Layer
    datasets: Mapping[str, DatasetEntry]
    grids: tuple[Mapping[str, Sequence[Any]], ...]
    """Values by dotted setting."""
    figures: tuple[FigureSpec, ...]


def load_sweep(path: Path) -> SweepSpec:
    """Read a sweep file.

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
    try:
        return _read(path.stem, content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def parse_overrides(given: Sequence[str]) -> Layer:
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
    return _layer(layer, "--set")


def _read(name: str, content: Mapping[str, Any]) -> SweepSpec:
    _check_keys(content, _KEYS)
    measure = content.get("measure", "training")
    if measure not in get_args(Measure):
        raise InputError(f"measure is one of training, steps; got {measure!r}")
    if "steps" in content and measure != "steps":
        raise InputError('steps belongs to measure = "steps"; leave it out')
    seeds, steps = content.get("seeds", [0]), content.get("steps", 40)
    if not _whole_numbers(seeds) or len(set(seeds)) < len(seeds):
        raise InputError(f"seeds are whole numbers, each once; got {seeds!r}")
    if not _whole_numbers([steps]) or steps < 1:
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
        seeds=tuple(seeds),
        base=_layer(_table("base", content.get("base", {})), "base"),
        datasets={one: _read_dataset(one, given) for one, given in datasets.items()},
        grids=tuple(_read_grid(number, given) for number, given in enumerate(grids, 1)),
        figures=figures,
    )


def _read_dataset(name: str, given: Any) -> DatasetEntry:
    where = f"[datasets.{name}]"
    _check_keys(_table(f"datasets.{name}", given), _DATASET_KEYS, f"{where} ")
    layer = _layer({key: given[key] for key in given if key in SECTIONS}, where)
    made, path = given.get("synthetic"), given.get("path")
    if made is not None and path is not None:
        raise InputError(f"{where} is either found at a path or synthetic: leave one out")
    if path is not None and not isinstance(path, str):
        raise InputError(f"{where} path must be a text; got {path!r}")
    if made is None:
        return DatasetEntry(layer, path=path)
    known = [entry.name for entry in fields(Synthetic)]
    _check_keys(_table(f"datasets.{name}.synthetic", made), known, f"{where} synthetic.")
    for key in ("items", "users"):
        if key not in made:
            raise InputError(f"{where} synthetic needs {key}")
    try:
        return DatasetEntry(layer, synthetic=Synthetic(**made))
    except (TypeError, InputError) as error:
        raise InputError(f"{where} synthetic: {error}") from error


def _read_grid(number: int, given: Mapping[str, Any]) -> dict[str, list[Any]]:
    where = f"[[grid]] {number}: "
    _check_keys(given, SECTIONS, where)
    grid: dict[str, list[Any]] = {}
    for section, settings in given.items():
        for name, values in _table(f"grid {number}, {section}", settings).items():
            dotted = f"{section}.{name}"
            _check_keys([dotted], sorted(setting_names()), where)
            grid[dotted] = values if isinstance(values, list) else [values]
            if not grid[dotted]:
                raise InputError(f"{where}{dotted} is an empty list")
    if SEED in grid:
        raise InputError(f"{where}{_NO_SEED}")
    for dotted, whole in _SHARES.items():
        if dotted in grid:
            grid[dotted] = [_read_share(where + dotted, whole, value) for value in grid[dotted]]
    return grid


def _read_share(where: str, whole: str, value: Any) -> Any:
    """Read a text like "50% of items"; anything else is a plain value."""
    if not isinstance(value, str):
        return value
    found = _SHARE.fullmatch(value.strip())
    if found is None or found[2] != whole or not 0 < float(found[1]) <= 100:
        raise InputError(
            f"{where} is a whole number, or a share above 0 and up to 100, like '50% of {whole}'; "
            f"got {value!r}"
        )
    return Share(float(found[1]) / 100, whole)


def _layer(given: Mapping[str, Any], where: str) -> Layer:
    """Check settings; a seed among them would be passed over, or mix counts."""
    layer = check_layer(given, where)
    if "seed" in layer.get("training", {}):
        raise InputError(f"{where}: {_NO_SEED}")
    return layer


def _check_keys(given: Iterable[str], known: Sequence[str], where: str = "") -> None:
    for key in given:
        if key not in known:
            raise InputError(f"{where}{key} is unknown; {nearest(key, known)}")


def _table(name: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InputError(f"{name} is a table; write [{name}]")
    return given


def _tables(name: str, given: Any) -> list[Any]:
    if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
        raise InputError(f"{name} is a list of tables; write [[{name}]]")
    return given


def _whole_numbers(values: Any) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(type(value) is int and value >= 0 for value in values)
    )
