"""Rows over seeds: settings with means and spreads, the best of each loss, Pareto fronts.

Validation chooses, test reports: nothing here looks at a test metric to choose by it.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sce.experiments.rows import FINISHED, Row
from sce.units import is_number, show_digits

# In the order of the paper's columns.
LOSSES = {"bce": "BCE", "bce+": "BCE⁺", "gbce": "gBCE", "ce-": "CE⁻", "ce": "CE", "sce": "SCE"}
SCORE = "ndcg@10"  # by which settings are chosen, on validation events

Show = Callable[[float | None], str]  # a number as text

_SEED = "training.seed"
_NAMED = {
    "memory": ("memory_mib", "training"),
    "time": ("seconds", "training"),
    "speed": ("tokens_per_second",),
    "items": ("dataset", "n_items"),
}


def value_of(row: Row, name: str) -> Any:
    """What a row says: "test.ndcg@10", "memory", "time", "items", or a setting by its name."""
    if name in row["settings"]:
        return row["settings"][name]
    keys: Sequence[str] = _NAMED.get(name) or name.split(".", 1)
    found: Any = row
    for key in keys:
        if not isinstance(found, Mapping):
            return None
        found = found.get(key)
    return found


@dataclass(frozen=True)
class Setting:
    """One setting on one dataset: the runs that differ in nothing but the seed."""

    dataset: str
    items: int
    rows: tuple[Row, ...]

    @property
    def loss(self) -> str:
        """The name of the loss."""
        return str(self.rows[0]["settings"]["loss.name"])

    def value(self, name: str) -> Any:
        """What all its runs have in common, such as a setting."""
        return value_of(self.rows[0], name)

    def numbers(self, name: str) -> list[float]:
        """What each run measured, where it did."""
        found = (value_of(row, name) for row in self.rows)
        return [value for value in found if is_number(value)]

    def mean(self, name: str) -> float | None:
        """Over the seeds."""
        found = self.numbers(name)
        return statistics.fmean(found) if found else None

    def spread(self, name: str) -> float | None:
        """The standard deviation over the seeds; None where there is one."""
        found = self.numbers(name)
        return statistics.stdev(found) if len(found) > 1 else None

    @property
    def score(self) -> float:
        """The mean validation score, which settings are chosen by."""
        found = self.mean(f"validation.{SCORE}")
        return -math.inf if found is None else found


def is_validated(settings: Iterable[Setting]) -> bool:
    """Whether any has a validation score, so that it can choose among them."""
    return any(setting.score > -math.inf for setting in settings)


def group_settings(rows: Iterable[Row], status: str = FINISHED) -> list[Setting]:
    """Put the rows of a status that differ in nothing but the seed together."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] == status:
            settings = {name: value for name, value in row["settings"].items() if name != _SEED}
            # A few steps and a whole training are not two seeds of one thing, nor are failures of
            # two kinds.
            how = (row["measure"], row.get("steps"), (row.get("failure") or {}).get("kind"))
            key = (row["dataset"]["content_hash"], how, settings)
            groups.setdefault(json.dumps(key, sort_keys=True), []).append(row)
    return [as_setting(found) for found in groups.values()]


def as_setting(rows: Sequence[Row]) -> Setting:
    """Rows that differ in nothing but the seed, as one."""
    data = rows[0]["dataset"]
    ordered = sorted(rows, key=lambda row: int(row["seed"]))
    return Setting(data["name"], data["n_items"], tuple(ordered))


def name_apart(rows: Iterable[Row]) -> list[Row]:
    """Give every dataset one name, and two datasets never the same: "beauty", "beauty (2)"."""
    labels: dict[str, str] = {}  # by content
    found = []
    for row in rows:
        data = row["dataset"]
        if data["content_hash"] not in labels:
            taken, label, count = set(labels.values()), data["name"], 1
            while label in taken:
                count += 1
                label = f"{data['name']} ({count})"
            labels[data["content_hash"]] = label
        found.append(row | {"dataset": data | {"name": labels[data["content_hash"]]}})
    return found


def datasets_of(settings: Iterable[Setting]) -> list[str]:
    """Their names, the smallest catalogue first."""
    sizes = {setting.dataset: setting.items for setting in settings}
    return sorted(sizes, key=lambda name: (sizes[name], name))


Group = tuple[Any, ...]  # the values of the settings that are grouped by


def group_by(settings: Iterable[Setting], names: Sequence[str]) -> dict[Group, list[Setting]]:
    """Settings by the values of some of them; losses in the paper's order, numbers ascending."""
    found: dict[Group, list[Setting]] = {}
    for setting in settings:
        found.setdefault(tuple(setting.value(name) for name in names), []).append(setting)
    return dict(sorted(found.items(), key=lambda pair: [_order(value) for value in pair[0]]))


def _order(value: Any) -> tuple[int, float, str]:
    if value in LOSSES and isinstance(value, str):
        return 1, float(list(LOSSES).index(value)), ""
    if isinstance(value, int | float):
        return 2, float(value), ""
    return (0 if value is None else 3), 0.0, str(value)


def name_group(names: Sequence[str], group: Group, among: Iterable[Group] = ()) -> str:
    """A group in words, without the settings that do not apply to it.

    Where it is one among others, also without those that are the same in all groups of its loss.

    >>> name_group(["loss.name", "loss.mix"], ("sce", False)), name_group(["loss.alpha"], (2.0,))
    ('SCE, without mix', 'alpha 2')
    >>> name_group(["loss.mix", "loss.mix_of"], (False, None)), name_group(["loss.alpha"], (None,))
    ('without mix', 'alpha –')
    >>> name_group(["loss.name", "loss.mix"], ("sce", True), [("ce", None), ("sce", True)])
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
        return LOSSES.get(value, str(value))
    if isinstance(value, bool):
        return f"{'with' if value else 'without'} {short}"
    return f"{short} {show_value(value)}"


def show_value(value: Any) -> str:
    """The value of a setting."""
    if is_number(value):
        return f"{value:,}" if isinstance(value, int) else show_digits(value)
    return "–" if value is None else str(value)


def with_most_seeds(settings: Iterable[Setting]) -> list[Setting]:
    """Those that as many seeds finished of as of any: a mean of few is luck sooner than skill.

    A setting that diverged with some of its seeds is not among them, where others did not.
    """
    found = list(settings)
    most = max((len(setting.rows) for setting in found), default=0)
    return [setting for setting in found if len(setting.rows) == most]


def best(settings: Iterable[Setting]) -> Setting | None:
    """The setting with the best validation score, of those with the most seeds."""
    return max(with_most_seeds(settings), key=lambda setting: setting.score, default=None)


def front(settings: Iterable[Setting], cost: str) -> list[Setting]:
    """Those that nothing as cheap is better than on validation events, the cheapest first.

    Args:
        settings: To choose from: those with the most seeds.
        cost: "memory" or "time".
    """
    priced = [(setting.mean(cost), setting) for setting in with_most_seeds(settings)]
    real = [(price, setting) for price, setting in priced if price is not None]
    found: list[Setting] = []
    for _, setting in sorted(real, key=lambda pair: (pair[0], -pair[1].score)):
        if not found or setting.score > found[-1].score:
            found.append(setting)
    return found


def share_device(settings: Iterable[Setting]) -> bool:
    """Whether any run that tells its time was not known to have the device to itself.

    Times then compare only roughly.
    """
    return any(
        row.get("at_once") != 1
        for setting in settings
        for row in setting.rows
        if value_of(row, "time") is not None
    )


def varied(settings: Sequence[Setting], *, across: bool = False) -> list[str]:
    """The names of what differs among settings of one loss and dataset, beside the seed.

    With `across`, also what a loss has otherwise on one dataset than on another.
    """
    values: dict[tuple[str, str, str], set[str]] = {}
    for setting in settings:
        for name, value in setting.rows[0]["settings"].items():
            everywhere = across and name.startswith("loss.")
            key = ("" if everywhere else setting.dataset, setting.loss, name)
            values.setdefault(key, set()).add(json.dumps(value))
    differing = [name for (*_, name), seen in values.items() if len(seen) > 1]
    return [name for name in dict.fromkeys(differing) if name != _SEED]


def describe(setting: Setting, names: Sequence[str]) -> str:
    """A setting by its loss, and by the settings that vary."""
    words = [LOSSES.get(setting.loss, setting.loss)]
    for name in names:
        value = setting.value(name)
        if value is not None and name != "loss.name":
            words.append(_in_words(name, value))
    return ", ".join(words)


def relative(value: float | None, other: float | None) -> float | None:
    """By which share a value is above another."""
    if value is None or other is None or other == 0:
        return None
    return value / other - 1


def show_change(change: float | None) -> str:
    """A share as a change in percent.

    >>> show_change(0.169), show_change(-0.0298), show_change(None)
    ('+16.9%', '−2.98%', '–')
    """
    if change is None:
        return "–"
    sign = "+" if change >= 0 else "−"
    return f"{sign}{show_digits(abs(100 * change))}%"


def with_spread(setting: Setting, name: str, show: Show) -> str:
    """A mean over seeds, and its standard deviation where there is one."""
    spread = setting.spread(name)
    return show(setting.mean(name)) + ("" if spread is None else f" ± {show(spread)}")
