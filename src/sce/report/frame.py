"""Rows over seeds: means and spreads, the best of each loss, Pareto fronts.

Validation chooses, test reports: nothing here looks at a test metric to choose by it.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sce import units
from sce.evaluation.metrics import METRICS
from sce.experiments.figure_spec import MEASURES, ORIGINS
from sce.experiments.spec import differing
from sce.experiments.store import FINISHED, Row, lookup
from sce.losses import LOSSES
from sce.training.settings import TrainingSettings

SCORE, TEST = "validation.ndcg@10", "test.ndcg@10"  # settings are chosen by the former
WHOLE_PROCESS = "Memory is that of the whole process, libraries included: there was no GPU."

Show = Callable[[float | None], str]
Group = tuple[Any, ...]  # the values of the settings that are grouped by

_SHOWN: dict[str, tuple[str, Show]] = {
    "test NDCG@10": ("test.ndcg@10", units.show_metric),
    "validation NDCG@10": (SCORE, units.show_metric),
    "peak memory": ("memory", units.show_memory),
    "training time": ("time", units.show_duration),
}
TOLD = ["setting", "seeds", *_SHOWN]
_NAMED = {name: one.keys for name, one in MEASURES.items()} | {"items": ("dataset", "n_items")}
_OF_ORIGINS = ("start.", "added.")  # of which the name of the run alone is shown
_NEUTRAL = ("training.save_minutes", "training.evaluation_batch_size")  # they change no result
_COSTS = ("memory_mib", "seconds", "tokens_per_second", "components_mib", "memory_measured",
          "device")  # fmt: skip


def number(record: Any, *keys: str) -> float | None:
    """The finite number deep in a record; None where there is none."""
    found = lookup(record, *keys)
    return found if units.is_number(found) else None


@dataclass(frozen=True, eq=False)
class SeedGroup:
    """One setting on one dataset: the runs that differ in nothing but the seed."""

    rows: tuple[Row, ...]

    @property
    def dataset(self) -> str:
        """The name of the dataset."""
        return str(self.rows[0]["dataset"]["name"])

    @property
    def loss(self) -> str:
        """The name of the loss."""
        return str(self.rows[0]["settings"]["loss.name"])

    def value(self, name: str) -> Any:
        """A value that all its runs share: a setting, "measure" or "items"."""
        settings = self.rows[0]["settings"]
        return settings[name] if name in settings else lookup(self.rows[0], *_keys(name))

    def values(self, name: str) -> list[float]:
        """The numbers of the seeds that have one: "test.ndcg@10", "memory", "time"."""
        found = (number(row, *_keys(name)) for row in self.rows)
        return [value for value in found if value is not None]

    def mean(self, name: str) -> float | None:
        """Mean over the seeds that have the value."""
        found = self.values(name)
        return statistics.fmean(found) if found else None

    def spread(self, name: str) -> float | None:
        """Standard deviation over the seeds; None for a single one."""
        found = self.values(name)
        return statistics.stdev(found) if len(found) > 1 else None

    def show(self, name: str, show: Show) -> str:
        """The mean, and the standard deviation where there is one."""
        return show_around(self.mean(name), self.spread(name), show)

    @property
    def score(self) -> float:
        """Mean validation score, by which settings are chosen."""
        found = self.mean(SCORE)
        return -math.inf if found is None else found


def _keys(name: str) -> Sequence[str]:
    return _NAMED.get(name) or name.split(".")


def group_seeds(rows: Iterable[Row], status: str = FINISHED) -> list[SeedGroup]:
    """Group the rows of a status that differ in nothing but the seed, or in what changes no result.

    Where the latter is all that tells two runs of one seed apart, it does.
    """
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: int(row["seed"])):
        if row["status"] == status:
            # Neither measured steps beside a training nor failures of two kinds are seeds.
            how = [row["measure"], row.get("steps"), lookup(row, "failure", "kind")]
            data = row["dataset"]["content_hash"], row["dataset"].get("times") or ""
            alike = (data, how, _decisive(row))
            groups.setdefault(json.dumps(alike, sort_keys=True), []).append(row)
    found: list[SeedGroup] = []
    for seeds in groups.values():
        apart: dict[str, list[Row]] = {}
        twice = len({row["seed"] for row in seeds}) < len(seeds)
        for row in seeds:
            one = row if twice else row | {"settings": _decisive(row)}
            key = json.dumps(one["settings"] | {"training.seed": None}, sort_keys=True)
            apart.setdefault(key, []).append(one)
        found += [SeedGroup(tuple(rows)) for rows in apart.values()]
    return found


def _decisive(row: Row) -> dict[str, Any]:
    """The settings that can change a result, but for the seed; of several GPUs any is the same."""
    left_out = ("training.seed", *_NEUTRAL)
    settings = {name: value for name, value in row["settings"].items() if name not in left_out}
    if device := settings.get("training.device"):
        settings["training.device"] = str(device).partition(":")[0]
    return settings


def datasets_of(groups: Iterable[SeedGroup]) -> list[str]:
    """Names of the datasets, the smallest catalogue first."""
    sizes = {group.dataset: group.value("items") for group in groups}
    return sorted(sizes, key=lambda name: (sizes[name], name))


def group_by(groups: Iterable[SeedGroup], names: Sequence[str]) -> dict[Group, list[SeedGroup]]:
    """Seed groups by the values of settings; losses in their table's order, numbers ascending."""
    found: dict[Group, list[SeedGroup]] = {}
    for group in groups:
        found.setdefault(tuple(group.value(name) for name in names), []).append(group)
    return dict(sorted(found.items(), key=lambda pair: [_order(value) for value in pair[0]]))


def _order(value: Any) -> tuple[int, float, str]:
    if isinstance(value, str) and value in LOSSES:
        return 1, float(list(LOSSES).index(value)), ""
    if isinstance(value, int | float):
        return 2, float(value), ""
    return (0 if value is None else 3), 0.0, str(value)


def name_loss(name: Any) -> str:
    """The label of a loss; a name that is not in the table stands for itself."""
    return LOSSES[name].label if name in LOSSES else str(name)


def name_metric(name: str) -> str:
    """The label of a metric: "ndcg@10" is NDCG@10."""
    kind, _, depth = name.partition("@")
    return f"{METRICS[kind].label if kind in METRICS else kind}{depth and '@'}{depth}"


def name_group(names: Sequence[str], group: Group, among: Iterable[Group] = ()) -> str:
    """A group in words, without the settings that do not apply to it.

    Among other groups, also without those that are the same in all groups of its loss.

    >>> name_group(["loss.name", "training.compile"], ("sce", False))
    'SCE, without compile'
    >>> name_group(["loss.centres", "loss.alpha"], ("mix", None)), name_group(["loss.t"], (None,))
    ('centres mix', 't –')
    >>> name_group(["loss.name", "loss.alpha"], ("sce", 2.0), [("ce", None), ("sce", 2.0)])
    'SCE'
    """
    pairs = list(zip(names, group, strict=True))
    if "loss.name" in names and (others := list(among)):
        loss = list(names).index("loss.name")
        alike = [other for other in others if other[loss] == group[loss]]
        pairs = [
            pair
            for place, pair in enumerate(pairs)
            if place == loss or any(other[place] != group[place] for other in alike)
        ]
    real = [(name, value) for name, value in pairs if value is not None]
    return ", ".join(_in_words(name, value) for name, value in real or pairs)


def _in_words(name: str, value: Any) -> str:
    short = ORIGINS.get(name, name.rpartition(".")[2])
    if name == "loss.name":
        return name_loss(value)
    if isinstance(value, bool):
        return f"{'with' if value else 'without'} {short}"
    if units.is_number(value):
        return f"{short} {f'{value:,}' if isinstance(value, int) else units.show_digits(value)}"
    return f"{short} {'–' if value is None else value}"


def varied(groups: Iterable[SeedGroup], *, across: bool = False) -> list[str]:
    """Names of the settings that differ within one loss and dataset, apart from the seed.

    With `across`, also settings of a loss that differ from one dataset to another.
    """
    runs = [(one.dataset, one.rows[0]["settings"]) for one in groups]
    found = dict.fromkeys(name for *_, name in differing(runs, across=across))
    origins = [name for name in ORIGINS if len({given.get(name) for _, given in runs}) > 1]
    left_out = ("training.seed", *_OF_ORIGINS)
    return [name for name in found if not name.startswith(left_out)] + origins


def other_settings(columns: Sequence[Sequence[SeedGroup]], but: Sequence[str] = ()) -> str:
    """Settings of model and training in which columns differ, in words: "epochs 3 / 2".

    Each column has its chosen setting first, then whatever else was tried. A setting of which all
    columns tried the same values was chosen by validation, and is left out.
    """
    names = dict.fromkeys(name for one, *_ in columns for name in one.rows[0]["settings"])
    left_out = {"training.seed", "training.device", *_NEUTRAL, *but}
    words = []
    for name in names:
        tried = [[json.dumps(one.value(name)) for one in column] for column in columns]
        if name.startswith(("loss.", *_OF_ORIGINS)) or name in left_out:
            continue
        if len({one for one, *_ in tried}) == 1:
            continue
        if len(set(map(frozenset, tried))) > 1:
            values = (one.value(name) for one, *_ in columns)
            shown = " / ".join("–" if value is None else str(value) for value in values)
            words.append(f"{name.removesuffix('.name').rpartition('.')[2]} {shown}")
    return ", ".join(words)


def describe(group: SeedGroup, names: Sequence[str]) -> str:
    """A setting by its loss, and by the settings that vary."""
    shown = ["loss.name", *names]
    return name_group(shown, tuple(group.value(name) for name in shown))


def tell(group: SeedGroup, names: Sequence[str], more: str = "") -> list[str]:
    """A setting in words and numbers, under the heads of TOLD."""
    label = ", ".join(filter(None, [describe(group, names), more]))
    return [label, str(len(group.rows)), *(group.show(*one) for one in _SHOWN.values())]


def with_most_seeds(groups: Iterable[SeedGroup]) -> list[SeedGroup]:
    """Those with the most seeds: one that diverged with some of its seeds does not compete."""
    found = list(groups)
    most = max((len(group.rows) for group in found), default=0)
    return [group for group in found if len(group.rows) == most]


def best(groups: Iterable[SeedGroup]) -> SeedGroup | None:
    """The setting with the best validation score, of those with the most seeds."""
    return max(with_most_seeds(groups), key=lambda group: group.score, default=None)


def front(groups: Iterable[SeedGroup], cost: str) -> list[SeedGroup]:
    """The Pareto front of validation score against "memory" or "time", the cheapest first."""
    priced = [(group.mean(cost), group) for group in with_most_seeds(groups)]
    real = [(price, group) for price, group in priced if price is not None]
    found: list[SeedGroup] = []
    for _, group in sorted(real, key=lambda pair: (pair[0], -pair[1].score)):
        if not found or group.score > found[-1].score:
            found.append(group)
    return found


def relative(value: float | None, other: float | None) -> float | None:
    """By which share a value is above another."""
    return None if value is None or not other else value / other - 1


def show_around(mean: float | None, spread: float | None, show: Show) -> str:
    """A mean and, where there is one, the spread around it."""
    return " ± ".join(filter(None, units.show_spread(mean, spread, show)))


def show_change(change: float | None) -> str:
    """A share as a change in percent.

    >>> show_change(0.169), show_change(-0.0298), show_change(None)
    ('+16.9%', '−2.98%', '–')
    """
    if change is None:
        return "–"
    return f"{'+' if change >= 0 else '−'}{units.show_digits(abs(100 * change))}%"


def unconverged(group: SeedGroup) -> int:
    """How many of its runs show no end of learning: longer training may do better.

    Best in the last epoch, or at the first of fewer evaluations than the patience.
    """
    every = group.value("training.evaluate_every") or 1
    patience = group.value("training.patience") or TrainingSettings.patience
    epochs = [(number(row, "best_epoch"), number(row, "epochs") or 0) for row in group.rows]
    return sum(
        best is not None and (best == last or (best <= every and last / every < patience))
        for best, last in epochs
    )


def above(group: SeedGroup, measure: str = TEST) -> float | None:
    """A test metric of popularity where it is above the group's."""
    popular, mean = number(group.rows[0], "popularity", *measure.split(".")), group.mean(measure)
    return popular if popular is not None and mean is not None and mean < popular else None


def is_exact(group: SeedGroup) -> bool:
    """True if every bucket of SCE held the whole catalogue, and every state was in one."""
    sizes = group.rows[0].get("derived") or {}
    whole = sizes.get("bucket_size_y", 0) >= group.value("items")
    return whole and "bucket_size_x" not in sizes


def is_ranked(measure: str, rows: Iterable[Row]) -> bool:
    """False for times of runs beside others, and for memory of which most is not the loss's."""
    return not {"time": shared_device, "memory": is_resident}.get(measure, lambda _: False)(rows)


def shared_device(rows: Iterable[Row]) -> bool:
    """True if a timed run may not have had the device to itself: times compare only roughly."""
    return any(row.get("at_once") != 1 for row in rows if number(row, "seconds", "training"))


def is_resident(rows: Iterable[Row]) -> bool:
    """True if any memory is that of a whole process: most of it is not the loss's."""
    return any("resident" in (_conditions(row) or "") for row in rows)


def measured_on(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Sentences: the devices of runs, and what their memory is."""
    devices, measures = (
        sorted({str(one[name]) for one in records if one.get(name)})
        for name in ("device", "memory_measured")
    )
    if devices:
        yield f"Measured on {' and '.join(devices)}."
    if measures:
        yield f"Memory is the {' or the '.join(measures)}."


def comparable(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """The same rows, with memory and time measured in one way on one device for each dataset.

    A sweep can be begun on a laptop and continued on a GPU. What most of a dataset's runs have
    counts; others lose their memory and time, keep their metrics, and are told of in sentences.
    """
    found: dict[str, Counter[str]] = {}
    for row in rows:
        here = found.setdefault(row["dataset"]["name"], Counter())
        here.update(filter(None, [_conditions(row)]))
    told, kept = [], {}
    for name, counts in found.items():
        first, *others = sorted(counts, key=lambda one: (-counts[one], "resident" in one)) or [""]
        kept[name] = first
        if others:
            those = " and ".join(f"{units.plural(counts[one], 'run')} on {one}" for one in others)
            told.append(f"Memory and time on {name} are those measured on {first}; those of "
                        f"{those} are left out.")  # fmt: skip
    stripped = [
        row if _conditions(row) in (None, kept[row["dataset"]["name"]])
        else {name: value for name, value in row.items() if name not in _COSTS}
        for row in rows
    ]  # fmt: skip
    return stripped, told


def _conditions(row: Row) -> str | None:
    """The device of a run and its measure of memory; None if it measured neither."""
    if not (row.get("memory_mib") or row.get("seconds")):
        return None
    measured = row.get("memory_measured") or "memory measured somehow"
    return f"{row.get('device') or 'an unknown device'} ({measured})"
