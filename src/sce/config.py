"""All settings of a run: those of model, loss and training, from a TOML file and from flags."""

import ast
import difflib
import inspect
import textwrap
import tomllib
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import nn

from sce.data.prepared import PreparedDataset
from sce.errors import InputError
from sce.models.sasrec import SASRec, SASRecSettings
from sce.training.objective import LossSettings, Workload, build_loss, settings_of
from sce.training.rowwise import NEEDS_SCE
from sce.training.settings import TrainingSettings

SECTIONS: dict[str, type] = {
    "model": SASRecSettings,
    "loss": LossSettings,
    "training": TrainingSettings,
}

Layer = Mapping[str, Mapping[str, Any]]  # by section and name, what was given


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run gives, beside the dataset."""

    model: SASRecSettings = field(default_factory=SASRecSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)

    def __post_init__(self) -> None:
        if self.training.row_wise and self.loss.name != "sce":
            raise InputError(f"{NEEDS_SCE}; the loss is {self.loss.name}")

    @classmethod
    def compose(cls, *layers: Layer) -> "Config":
        """Lay settings over the defaults, the later over the earlier.

        Raises:
            InputError: When settings contradict each other.
        """
        merged: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for layer in layers:
            for section, given in layer.items():
                merged[section] |= given
        return cls(**{section: SECTIONS[section](**given) for section, given in merged.items()})

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Every setting by section and name, defaults included; None is what `settled` fills in."""
        return asdict(self)

    def settled(self, n_items: int, n_events: int) -> "Config":
        """Fill in what follows from a dataset, its items and its training events."""
        by_rows = self.training.row_wise
        return replace(self, loss=self.loss.settled(n_items, n_events, sparse_grad=by_rows))

    def build(self, dataset: PreparedDataset) -> tuple[SASRec, nn.Module]:
        """Make the model and the loss, sized for the dataset."""
        try:
            model = SASRec(dataset.n_items, self.model, seed=self.training.seed)
        except (RuntimeError, MemoryError) as error:
            raise InputError(
                f"a model of {dataset.n_items:,} items in {self.model.dim:,} dimensions does not "
                "fit into memory; choose a smaller --model.dim or --model.max-length"
            ) from error
        workload = Workload.measure(
            dataset.train,
            dataset.n_items,
            batch_size=self.training.batch_size,
            max_length=self.model.max_length,
        )
        return model, build_loss(self.loss, workload, sparse_grad=self.training.row_wise)


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


def for_loss(file: Layer, options: Layer) -> tuple[Layer, list[str]]:
    """Leave out of a file what only its own loss understands, where the options name another.

    Returns:
        The settings of the file that remain, and the names of those of the loss that do not.
    """
    of_loss = file.get("loss", {})
    name = options.get("loss", {}).get("name")
    if name is None or name == of_loss.get("name", LossSettings.name):
        return file, []
    known = settings_of(name) | {"name"}
    kept = {key: value for key, value in of_loss.items() if key in known}
    return {**file, "loss": kept}, [key for key in of_loss if key not in known]


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
        kinds = get_type_hints(SECTIONS[section])
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


def describe_settings(settings: type) -> dict[str, str]:
    """The documentation of each field of a settings dataclass: the string that follows it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(settings))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return {entry.name: found.get(entry.name, "") for entry in fields(settings)}


def nearest(given: str, known: Mapping[str, object]) -> str:
    """Say which valid key was perhaps meant, or which there are."""
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    if close:
        return f"the nearest valid key is {close[0]}"
    return f"valid keys are {', '.join(known)}"


def _elsewhere(given: str, section: str | None = None) -> str | None:
    """Say in which other table the key belongs, or the nearest key if that is in another one."""
    tables = {
        entry.name: table for table, settings in SECTIONS.items() for entry in fields(settings)
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
