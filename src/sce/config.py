"""All settings of a run: those of model, loss and training, from a TOML file and from flags."""

import ast
import difflib
import inspect
import textwrap
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import nn

from sce.data.prepared import PreparedDataset
from sce.errors import InputError
from sce.losses import DEFAULT_LOSS, LOSSES
from sce.models.registry import BACKBONES, DEFAULT_BACKBONE
from sce.planning.summary import summarize_data
from sce.training.settings import TrainingSettings

Layer = Mapping[str, Mapping[str, Any]]  # by section and name, what was given


def _kinds(section: str) -> dict[str, Any]:
    if section == "training":
        return get_type_hints(TrainingSettings)
    table: Any = LOSSES if section == "loss" else BACKBONES
    found: dict[str, Any] = {"name": Literal[tuple(table)]}
    for entry in table.values():
        found |= get_type_hints(entry.settings)
    return found


SECTIONS: dict[str, Any] = {"model": None, "loss": None, "training": None}


def setting_names() -> set[str]:
    return {f"{section}.{name}" for section in SECTIONS for name in _kinds(section)}


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run gives, beside the dataset."""

    names: Mapping[str, str]
    model: Any
    loss: Any
    training: TrainingSettings

    @classmethod
    def compose(cls, *layers: Layer) -> "Config":
        merged: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for layer in layers:
            for section, given in layer.items():
                merged[section] |= given
        loss = merged["loss"].pop("name", DEFAULT_LOSS)
        model = merged["model"].pop("name", DEFAULT_BACKBONE)
        of = LOSSES[loss].settings
        for name in merged["loss"]:
            if name not in {f.name for f in fields(of)}:
                raise InputError(f"loss.{name} is no setting of {loss}")
        try:
            return cls(
                {"model": model, "loss": loss},
                BACKBONES[model].settings(**merged["model"]),
                of(**merged["loss"]),
                TrainingSettings(**merged["training"]),
            )
        except ValueError as error:
            raise InputError(str(error)) from error

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return {
            "model": {"name": self.names["model"], **asdict(self.model)},
            "loss": {"name": self.names["loss"], **asdict(self.loss)},
            "training": asdict(self.training),
        }

    def build(self, dataset: PreparedDataset) -> tuple[Any, nn.Module]:
        model = self.model.build(dataset.n_items, seed=self.training.seed)
        data = summarize_data(
            dataset.train,
            dataset.n_items,
            batch_size=self.training.batch_size,
            max_length=self.model.max_length,
        )
        return model, self.loss.build(data)


def load_toml(path: Path | str) -> dict[str, dict[str, Any]]:
    """Read settings from a TOML file with the tables model, loss and training, as far as given.

    Raises:
        InputError: When there is no such file, a key is unknown, or a value is of the wrong kind.
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error
    return check_layer(content, str(path))


def check_layer(content: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Settings by section and name, each checked and as its type has it.

    Args:
        content: As a TOML file has it.
        where: It came from, for messages.

    Raises:
        InputError: When a key is unknown, or a value is of the wrong kind.
    """
    layer: dict[str, dict[str, Any]] = {}
    for section, given in content.items():
        if section not in SECTIONS:
            what = f"[{section}]" if isinstance(given, Mapping) else section
            hint = nearest(section, SECTIONS) if isinstance(given, Mapping) else _elsewhere(section)
            raise InputError(f"{where}: {what} is unknown; {hint or nearest(section, SECTIONS)}")
        if not isinstance(given, Mapping):
            raise InputError(f"{where}: {section} is a table of settings; write [{section}]")
        kinds = _kinds(section)
        layer[section] = {}
        for name, value in given.items():
            if name not in kinds:
                hint = _elsewhere(name, section) or nearest(name, kinds)
                raise InputError(f"{where}: [{section}] {name} is unknown; {hint}")
            try:
                layer[section][name] = _convert(value, kinds[name])
            except TypeError as error:
                raise InputError(
                    f"{where}: [{section}] {name} must be {_words(kinds[name])}; got {value!r}"
                ) from error
    return layer


def nearest(given: str, known: Iterable[str]) -> str:
    """Say which valid key was perhaps meant, or which there are."""
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    if close:
        return f"the nearest valid key is {close[0]}"
    return f"valid keys are {', '.join(known)}"


def _elsewhere(given: str, section: str | None = None) -> str | None:
    """Say in which other table the key belongs, or the nearest key if that is in another one."""
    tables = {
        name: table for table in SECTIONS for name in _kinds(table)
    }
    if given in tables:
        return f"it belongs in the table [{tables[given]}]"
    close = difflib.get_close_matches(given, tables, n=1, cutoff=0.6)
    if close and tables[close[0]] != section:
        return f"the nearest valid key is {close[0]}, in the table [{tables[close[0]]}]"
    return None


def _convert(value: Any, kind: Any) -> Any:
    """Return the value as this type has it; a TypeError says that it cannot be."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (kind,) = (a for a in arguments if a is not type(None))
        return _convert(value, kind)
    if origin is Literal:
        fits = value in arguments
    elif origin is tuple:
        if isinstance(value, list) and len(value) == len(arguments):
            return tuple(_convert(v, a) for v, a in zip(value, arguments, strict=True))
        fits = False
    elif kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        fits = False
    else:
        fits = type(value) is kind  # true is not 1
    if not fits:
        raise TypeError
    return value


def _words(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _words(next(a for a in arguments if a is not type(None)))
    if origin is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in arguments)
    if origin is tuple:
        return f"a list of {len(arguments)} numbers"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names[kind]
