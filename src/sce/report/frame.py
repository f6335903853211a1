"""Rows over seeds: means and spreads, the best of each loss, Pareto fronts.

Validation chooses, test reports: nothing here looks at a test metric to choose by it. Memory and
time compare only among runs that measured them in one way, on one device: a sweep can be begun on a
laptop and continued on a GPU.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sce.experiments.store import FINISHED, Row
from sce.losses import LOSSES
from sce.units import is_number, plural, show_digits

SCORE = "ndcg@10"  # settings are chosen by it, on validation events
WHOLE_PROCESS = "Memory is that of the whole process, libraries included: there was no GPU."
# The metrics by their names in rows and results.
METRICS = {"ndcg": "NDCG", "hr": "HR", "mrr": "MRR", "cov": "COV"}

Show = Callable[[float | None], str]
Group = tuple[Any, ...]  # the values of the settings that are grouped by

_SEED = "training.seed"
_NAMED = {
    "memory": ("memory_mib", "training"),
    "time": ("seconds", "training"),
    "speed": ("tokens_per_second",),
    "items": ("dataset", "n_items"),
}
_COSTS = ("memory_mib", "seconds", "tokens_per_second", "components_mib", "memory_measured",
          "device")  # fmt: skip


def lookup(record: Any, *keys: str) -> Any:
    """The value deep in a record; None where there is none."""
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def number(record: Any, *keys: str) -> float | None:
    """The finite number deep in a record; None where there is none."""
    found = lookup(record, *keys)
    return found if is_number(found) else None


def value_of(row: Row, name: str) -> Any:
    """A row's "test.ndcg@10", "memory", "time", "items", or a setting by its name."""
    if name in row["settings"]:
        return row["settings"][name]
    return lookup(row, *(_NAMED.get(name) or name.split(".", 1)))


@dataclass(frozen=True)
class SeedGroup:
    """One setting on one dataset: the runs that differ in nothing but the seed."""

    dataset: str
    items: int
    rows: tuple[Row, ...]

    @property
    def loss(self) -> str:
        """The name of the loss."""
        return str(self.rows[0]["settings"]["loss.name"])

    def value(self, name: str) -> Any:
        """A value that all its runs share, such as a setting."""
        return value_of(self.rows[0], name)

    def numbers(self, name: str) -> list[float]:
        """The measured value of each run that has one."""
        return [value for row in self.rows if is_number(value := value_of(row, name))]

    def mean(self, name: str) -> float | None:
        """Mean over the seeds."""
        found = self.numbers(name)
        return statistics.fmean(found) if found else None

    def spread(self, name: str) -> float | None:
        """Standard deviation over the seeds; None for a single one."""
        found = self.numbers(name)
        return statistics.stdev(found) if len(found) > 1 else None

    def show(self, name: str, show: Show) -> str:
        """The mean, and the standard deviation where there is one."""
        spread = self.spread(name)
        return show(self.mean(name)) + ("" if spread is None else f" ± {show(spread)}")

    @property
    def score(self) -> float:
        """Mean validation score, by which settings are chosen."""
        found = self.mean(f"validation.{SCORE}")
        return -math.inf if found is None else found


def group_seeds(rows: Iterable[Row], status: str = FINISHED) -> list[SeedGroup]:
    """Group the rows of a status that differ in nothing but the seed."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] == status:
            settings = {name: value for name, value in row["settings"].items() if name != _SEED}
            # Neither measured steps beside a training nor failures of two kinds are seeds.
            how = (row["measure"], row.get("steps"), lookup(row, "failure", "kind"))
            key = (row["dataset"]["content_hash"], how, settings)
            groups.setdefault(json.dumps(key, sort_keys=True), []).append(row)
    return [as_group(found) for found in groups.values()]


def as_group(rows: Sequence[Row]) -> SeedGroup:
    """Rows that differ in nothing but the seed, as one group."""
    data = rows[0]["dataset"]
    ordered = sorted(rows, key=lambda row: int(row["seed"]))
    return SeedGroup(data["name"], data["n_items"], tuple(ordered))


def datasets_of(groups: Iterable[SeedGroup]) -> list[str]:
    """Names of the datasets, the smallest catalogue first."""
    sizes = {group.dataset: group.items for group in groups}
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
    short = name.rpartition(".")[2]
    if name == "loss.name":
        return name_loss(value)
    if isinstance(value, bool):
        return f"{'with' if value else 'without'} {short}"
    if is_number(value):
        return f"{short} {f'{value:,}' if isinstance(value, int) else show_digits(value)}"
    return f"{short} {'–' if value is None else value}"


def varied(groups: Sequence[SeedGroup], *, across: bool = False) -> list[str]:
    """Names of the settings that differ within one loss and dataset, apart from the seed.

    With `across`, also settings of a loss that differ from one dataset to another.
    """
    values: dict[tuple[str, str, str], set[str]] = {}
    for group in groups:
        for name, value in group.rows[0]["settings"].items():
            everywhere = across and name.startswith("loss.")
            key = ("" if everywhere else group.dataset, group.loss, name)
            values.setdefault(key, set()).add(json.dumps(value))
    differing = [name for (*_, name), seen in values.items() if len(seen) > 1]
    return [name for name in dict.fromkeys(differing) if name != _SEED]


def describe(group: SeedGroup, names: Sequence[str]) -> str:
    """A setting by its loss, and by the settings that vary."""
    words = [name_loss(group.loss)]
    for name in names:
        value = group.value(name)
        if value is not None and name != "loss.name":
            words.append(_in_words(name, value))
    return ", ".join(words)


def _with_most_seeds(groups: Iterable[SeedGroup]) -> list[SeedGroup]:
    """Those with the most seeds: one that diverged with some of its seeds does not compete."""
    found = list(groups)
    most = max((len(group.rows) for group in found), default=0)
    return [group for group in found if len(group.rows) == most]


def best(groups: Iterable[SeedGroup]) -> SeedGroup | None:
    """The setting with the best validation score, of those with the most seeds."""
    return max(_with_most_seeds(groups), key=lambda group: group.score, default=None)


def is_validated(groups: Iterable[SeedGroup]) -> bool:
    """True if any has a validation score."""
    return any(group.score > -math.inf for group in groups)


def front(groups: Iterable[SeedGroup], cost: str) -> list[SeedGroup]:
    """The Pareto front of validation score against "memory" or "time", the cheapest first."""
    priced = [(group.mean(cost), group) for group in _with_most_seeds(groups)]
    real = [(price, group) for price, group in priced if price is not None]
    found: list[SeedGroup] = []
    for _, group in sorted(real, key=lambda pair: (pair[0], -pair[1].score)):
        if not found or group.score > found[-1].score:
            found.append(group)
    return found


def shared_device(groups: Iterable[SeedGroup]) -> bool:
    """True if a timed run may not have had the device to itself: times compare only roughly."""
    return any(
        row.get("at_once") != 1
        for group in groups
        for row in group.rows
        if value_of(row, "time") is not None
    )


def relative(value: float | None, other: float | None) -> float | None:
    """By which share a value is above another."""
    return None if value is None or not other else value / other - 1


def show_change(change: float | None) -> str:
    """A share as a change in percent.

    >>> show_change(0.169), show_change(-0.0298), show_change(None)
    ('+16.9%', '−2.98%', '–')
    """
    if change is None:
        return "–"
    return f"{'+' if change >= 0 else '−'}{show_digits(abs(100 * change))}%"


@dataclass(frozen=True)
class Conditions:
    """The device of a run, and its measure of memory."""

    device: str
    memory: str

    @property
    def is_resident(self) -> bool:
        """True if memory is that of the whole process: most of it is not the loss's."""
        return "resident" in self.memory

    def __str__(self) -> str:
        return f"{self.device} ({self.memory})"


def conditions_of(row: Row) -> Conditions | None:
    """The conditions of a run; None if it measured neither memory nor time."""
    if not (row.get("memory_mib") or row.get("seconds")):
        return None
    device, memory = row.get("device"), row.get("memory_measured")
    return Conditions(str(device or "an unknown device"), str(memory or "memory measured somehow"))


def all_conditions(groups: Iterable[SeedGroup]) -> set[Conditions]:
    """All conditions among the runs of these groups."""
    return {found for group in groups for row in group.rows if (found := conditions_of(row))}


def is_resident(groups: Iterable[SeedGroup]) -> bool:
    """True if any memory among these is that of a whole process."""
    return any(found.is_resident for found in all_conditions(groups))


def comparable(groups: Sequence[SeedGroup]) -> list[SeedGroup]:
    """The same groups, with memory and time under one set of conditions only.

    These are the conditions of most groups, on a GPU where two are as common. Other runs lose their
    memory and time, and keep their metrics.
    """
    kept = _most_common(groups)
    return [
        replace(
            group,
            rows=tuple(
                row
                if conditions_of(row) == kept
                else {name: value for name, value in row.items() if name not in _COSTS}
                for row in group.rows
            ),
        )
        for group in groups
    ]


def left_out(groups: Sequence[SeedGroup]) -> Iterator[str]:
    """A sentence about the runs whose memory and time `comparable` drops, if any."""
    kept = _most_common(groups)
    found = (conditions_of(row) for group in groups for row in group.rows)
    others = Counter(one for one in found if one is not None and one != kept)
    if others:
        told = " and ".join(
            f"{plural(count, 'run')} on {one}"
            for one, count in sorted(others.items(), key=lambda pair: str(pair[0]))
        )
        yield f"Memory and time are those measured on {kept}; those of {told} are left out."


def _most_common(groups: Iterable[SeedGroup]) -> Conditions | None:
    counts = Counter(found for group in groups for found in all_conditions([group]))
    return max(counts, key=lambda one: (counts[one], not one.is_resident, str(one)), default=None)
