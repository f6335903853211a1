"""What a comparison shows: figures and tables, as a settings file asks for them.

[[figures]]
kind = "pareto"                    # quality against a cost: memory or time
x = "memory"

[[figures]]
kind = "line"                      # a number against one swept setting, or against "items"
x = "loss.bucket_size_y"
y = "test.ndcg@10"

[[figures]]
kind = "epochs"                    # how a number went as training did
y = "picked_once"
by = ["loss.mix"]

[[figures]]
kind = "components"                # what the memory was taken by; of runs that measure steps

[[figures]]
kind = "table"                     # as the paper's: best in bold, second underlined
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from sce.config import SECTIONS, nearest
from sce.errors import InputError
from sce.losses import LOSSES
from sce.units import is_number

Kind = Literal["pareto", "line", "epochs", "components", "table"]

PAPER_METRICS = (
    *("ndcg@1", "ndcg@5", "ndcg@10", "hr@5", "hr@10"),  # at 1 the two are the same
    *("cov@1", "cov@5", "cov@10"),
)
COSTS = ("memory", "time")
COURSES = ("picked_once", "placed", "correct_in_bucket", "loss", "validation.ndcg@10")
MEASURES = (*COSTS, "speed")  # of a run, beside its metrics
_METRIC = re.compile(r"(ndcg|hr|mrr|cov)@(1|5|10|20|50)")  # what runs are evaluated by
_SETTINGS = tuple(
    f"{section}.{entry.name}" for section, kind in SECTIONS.items() for entry in fields(kind)
)
_REQUIRED = {"pareto": (), "line": ("x",), "epochs": ("y",), "components": (), "table": ()}


@dataclass(frozen=True)
class View:
    """A figure for each dataset, or a table."""

    kind: Kind
    title: str = ""
    text: str = ""
    """A sentence under the title."""
    x: str = ""
    """pareto: memory or time; line: a setting such as loss.alpha, or items."""
    y: str = "test.ndcg@10"
    """test.METRIC, memory or time; epochs: picked_once, placed, correct_in_bucket, loss, or
    validation.ndcg@10."""
    by: tuple[str, ...] = ("loss.name",)
    """Settings that make a curve or a column of their own."""
    losses: tuple[str, ...] = ()
    """Only these; all by default."""
    log: str = ""
    """Axes that are logarithmic: x, y or xy."""
    metrics: tuple[str, ...] = PAPER_METRICS
    """table: its rows."""
    published: tuple[Mapping[str, Any], ...] = ()
    """table: columns from elsewhere, each a name, metrics, and the dataset they are of."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InputError(f"kind is one of {', '.join(get_args(Kind))}; got {self.kind!r}")
        for name in _REQUIRED[self.kind]:
            if not getattr(self, name):
                raise InputError(f"a figure of kind {self.kind} needs {name}")
        if self.kind == "pareto" and (self.x or "memory") not in COSTS:
            raise InputError(f"the x of a pareto figure is {' or '.join(COSTS)}; got {self.x!r}")
        if self.kind == "epochs" and self.y not in COURSES:
            raise InputError(f"the y of epochs is one of {', '.join(COURSES)}; got {self.y!r}")
        if not set(self.log) <= set("xy"):
            raise InputError(f"log names axes: x, y or xy; got {self.log!r}")
        for one in self.by:
            _check("by", one, _SETTINGS)
        for one in self.losses:
            _check("losses", one, tuple(LOSSES))
        for one in self.metrics:
            if not (isinstance(one, str) and _METRIC.fullmatch(one)):
                _check("metrics", one, PAPER_METRICS)
        if self.kind == "line":
            _check("x", self.x, ("items", *_SETTINGS))
        split, _, metric = self.y.partition(".")
        known = split in ("test", "validation") and _METRIC.fullmatch(metric)
        if self.kind in ("line", "pareto") and not known:
            _check("y", self.y, (*MEASURES, *(f"test.{one}" for one in PAPER_METRICS)))
        for column in self.published:
            _check_published(column)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "View":
        """Make one of a table of a settings file, or of what `as_dict` gave.

        Raises:
            InputError: When something in it is unknown or of the wrong kind.
        """
        kinds = {entry.name: entry.type for entry in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in kinds:
                raise InputError(f"{name!r} is unknown in figures; known are {', '.join(kinds)}")
            listed = str(kinds[name]).startswith("tuple")
            if isinstance(value, list | tuple) is not listed or not (
                listed or isinstance(value, str)
            ):
                raise InputError(
                    f"{name} must be {'a list' if listed else 'a text'}; got {value!r}"
                )
            values[name] = tuple(value) if listed else value
        if "kind" not in values:
            raise InputError(f"a figure needs a kind: one of {', '.join(get_args(Kind))}")
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }


def _check(name: str, given: object, known: tuple[str, ...]) -> None:
    if given not in known:
        raise InputError(
            f"{name}: {given!r} is unknown; {nearest(str(given), dict.fromkeys(known))}"
        )


def _check_published(given: object) -> None:
    if not isinstance(given, Mapping):
        raise InputError(f"published is a list of tables; got {given!r}")
    for name, value in given.items():
        if name in ("name", "dataset"):
            if not isinstance(value, str):
                raise InputError(f"published: {name} must be a text; got {value!r}")
        elif not _METRIC.fullmatch(name):
            _check("published", name, ("name", "dataset", *PAPER_METRICS))
        elif not is_number(value):
            raise InputError(f"published: {name} must be a number; got {value!r}")


STEPS_VIEWS = (View("components"),)
DEFAULT_VIEWS = (
    View("table"),
    View("pareto", x="memory"),
    View("pareto", x="time"),
)
