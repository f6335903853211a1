"""The figures and tables that a sweep file asks `sce compare` for; see experiments/README.md."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from sce.config import nearest, setting_names
from sce.errors import InputError
from sce.evaluation.evaluate import KS
from sce.evaluation.metrics import METRICS
from sce.losses import LOSSES, BucketStatistics
from sce.units import is_number

PAPER_METRICS = (
    *("ndcg@1", "ndcg@5", "ndcg@10", "hr@5", "hr@10"),  # at 1 the two are the same
    *("cov@1", "cov@5", "cov@10"),
)
COSTS = ("memory", "time")


class Measure(NamedTuple):
    """A cost: where it is in a row, and its name."""

    keys: tuple[str, ...]
    label: str
    unit: str


MEASURES = {
    "memory": Measure(("memory_mib", "training"), "peak training memory", "MiB"),
    "time": Measure(("seconds", "training"), "training time", "seconds"),
    "speed": Measure(("tokens_per_second",), "training speed", "tokens per second"),
    # Of a loss by itself, in the rows of benchmarks.
    "step": Measure(("ms",), "forward and backward", "milliseconds"),
    "workspace": Measure(("extra MiB",), "beyond inputs and gradients", "MiB"),
}
# The columns of a row's history, and where the numbers are in the notes of an epoch.
HISTORY = {
    "loss": ("loss",),
    "validation.ndcg@10": ("validation", "ndcg@10"),
    **{name: ("buckets", name) for name in BucketStatistics._fields},
}
_METRICS = [f"{kind}@{k}" for kind in METRICS for k in KS]
_SCORES = [f"{split}.{metric}" for split in ("test", "validation") for metric in _METRICS]
ORIGINS = {"start.run": "from", "added.run": "with new items, of"}  # the run behind one, in words
_SETTINGS = sorted(setting_names() | {*ORIGINS})


class Chart(NamedTuple):
    """A kind of figure: the function that draws it, and what may stand on its axes."""

    draw: str
    x: Collection[str] = ()
    y: Collection[str] = ()


# A new kind of chart is a function, and a line here.
CHARTS = {
    "table": Chart("sce.report.tables:make_table"),
    "pareto": Chart("sce.report.charts:pareto", COSTS, [*MEASURES, *_SCORES]),
    "line": Chart("sce.report.charts:line", ["items", *_SETTINGS], [*MEASURES, *_SCORES]),
    "epochs": Chart("sce.report.charts:epochs", y=HISTORY),
    "components": Chart("sce.report.charts:components"),
}


@dataclass(frozen=True)
class FigureSpec:
    """A figure for each dataset, or a table."""

    kind: str
    title: str = ""
    text: str = ""  # a sentence under the title
    x: str = ""  # pareto: memory or time; line: a setting such as loss.alpha, or items
    y: str = "test.ndcg@10"
    """test.METRIC, memory or time; epochs: picked_once, placed, correct_in_bucket, occupied, loss,
    or validation.ndcg@10."""
    by: tuple[str, ...] = ("loss.name",)  # settings that make a curve or a column of their own
    losses: tuple[str, ...] = ()  # only these; all by default
    log: str = ""  # axes that are logarithmic: x, y or xy
    metrics: tuple[str, ...] = PAPER_METRICS  # table: its rows
    published: tuple[Mapping[str, Any], ...] = ()
    """table: columns from elsewhere, each a name, metrics, and the dataset they are of."""

    def __post_init__(self) -> None:
        check_known("kind: ", [self.kind], CHARTS)
        if self.kind == "line" and not self.x:
            raise InputError("a figure of kind line needs x")
        for axis in ("x", "y"):
            if known := getattr(CHARTS[self.kind], axis):
                check_known(f"{axis}: ", [getattr(self, axis) or "memory"], known)
        check_known("log: ", self.log, "xy")
        check_known("by: ", self.by, _SETTINGS)
        check_known("losses: ", self.losses, LOSSES)
        check_known("metrics: ", self.metrics, _METRICS)
        for column in self.published:
            if not isinstance(column, Mapping):
                raise InputError(f"published is a list of tables; got {column!r}")
            check_known("published: ", column, ["name", "dataset", *_METRICS])
            for name, value in column.items():
                if not (is_number(value) if "@" in name else isinstance(value, str)):
                    kind = "a number" if "@" in name else "a text"
                    raise InputError(f"published: {name} must be {kind}; got {value!r}")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "FigureSpec":
        """Make one of a table of a sweep file, or of its JSON."""
        kinds = {entry.name: str(entry.type) for entry in fields(cls)}
        check_known("figures: ", given, kinds)
        if "kind" not in given:
            raise InputError(f"a figure needs a kind: one of {', '.join(CHARTS)}")
        lists = [name for name in given if "tuple" in kinds[name]]
        for name, value in given.items():
            if not isinstance(value, list if name in lists else str):
                kind = "a list" if name in lists else "a text"
                raise InputError(f"{name} must be {kind}; got {value!r}")
        return cls(**{**given, **{name: tuple(given[name]) for name in lists}})


def check_known(where: str, given: Iterable[object], known: Collection[str]) -> None:
    """Refuse a key or value that is not among the known ones; name the nearest."""
    for one in given:
        if one not in known:
            raise InputError(f"{where}{one} is unknown; {nearest(str(one), known)}")


STEPS_FIGURES = (FigureSpec("components"),)
DEFAULT_FIGURES = (FigureSpec("table"), *(FigureSpec("pareto", x=cost) for cost in COSTS))
