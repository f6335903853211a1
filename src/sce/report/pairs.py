"""Two settings on one log: the same seeds, and the same users.

`relative_interval` says how much the choice of users moves their ratio; `field` goes over logs.
"""

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sce.experiments.store import Row
from sce.models.registry import DEFAULT_BACKBONE
from sce.report.frame import SCORE, TEST, Group, SeedGroup, best, number
from sce.report.tables import APART
from sce.training.run import read_ranks

Ranks = Sequence[NDArray[np.int32]]  # for each seed the ranks of targets, from 1; 0: not ranked

BY = ("model.name", "loss.name", "loss.negatives", "loss.cut")  # what settings are told apart by
RESAMPLES = 1000
DEPTH = 10  # of NDCG
LEAST = 20  # users that differ: with fewer, who they are decides the ends of an interval
_AT_ONCE = 10**7  # weights in memory


class Pair(NamedTuple):
    """Two settings on one log, with those of their runs whose seeds both have."""

    ours: SeedGroup
    theirs: SeedGroup

    @classmethod
    def of(cls, ours: SeedGroup, theirs: SeedGroup) -> "Pair | None":
        """The pair; None where they have no seed in common."""
        seeds = [{row["seed"]: row for row in one.rows} for one in (ours, theirs)]
        both = sorted(seeds[0].keys() & seeds[1].keys())
        sides = (SeedGroup(tuple(one[seed] for seed in both)) for one in seeds)
        return cls(*sides) if both else None

    def ratio(self, measure: str) -> float | None:
        """The mean over seeds, as a multiple of the other's; None where a run has no value."""
        values = [one.values(measure) for one in self]
        whole = all(len(found) == len(self.ours.rows) for found in values)
        ours, theirs = map(sum, values)
        return ours / theirs if whole and theirs else None

    def changes(self, measure: str = TEST) -> list[float]:
        """The logarithm of each of our seeds as a multiple of theirs.

        Over all targets 0 counts as half a hit of one user; over a part there are none if any is 0.
        """
        least = 0.5 / math.log2(DEPTH + 1) / (number(self.ours.rows[0], "users", "test") or 10**6)
        sides = [side.values(measure) for side in self]
        if not all(sides) or (measure != TEST and 0 in itertools.chain(*sides)):
            return []
        ours, theirs = ([math.log(max(one, least)) for one in side] for side in sides)
        return [one - statistics.fmean(theirs) for one in ours]

    def row(self) -> Row:
        """What is kept when the ranks are gone: ratios, and the interval over users."""
        found = {
            split: interval_of(self.ours, self.theirs, split) or "the ranks are not stored"
            for split in ("test", "validation")
        }
        ends = {
            split: None if isinstance(one, str) else [1 + end for end in one]
            for split, one in found.items()
        }
        return {
            "dataset": {
                name: self.ours.rows[0]["dataset"][name]
                for name in ("name", "content_hash", "n_items")
            },
            "setting": dict(zip(BY, setting_of(self.ours), strict=True)),
            "against": dict(zip(BY, setting_of(self.theirs), strict=True)),
            "seeds": [row["seed"] for row in self.ours.rows],
            "users": number(self.ours.rows[0], "users", "test"),
            "test": self.ratio(TEST),
            "interval": ends["test"],
            "no_interval": None if ends["test"] else found["test"],
            "validation": self.ratio(SCORE),
            "validation_interval": ends["validation"],
            **{kind: self.ratio(APART.format(kind)) for kind in ("popular", "rare")},
            "runs": [row["key"] for row in self.ours.rows],
            "against_runs": [row["key"] for row in self.theirs.rows],
        }


def setting_of(group: SeedGroup) -> Group:
    """The values of what settings are told apart by."""
    return tuple(_plain(group.value(name)) or None for name in BY)


def _plain(value: object) -> object:
    """A setting that is an object, such as a user's own sampler, by its name and settings."""
    if not isinstance(value, Mapping):
        return value
    rest = {name: one for name, one in value.items() if name != "name"}
    return f"{value.get('name', '')} {json.dumps(rest) if rest else ''}".strip()


def chosen(groups: Iterable[SeedGroup]) -> dict[str, dict[Group, SeedGroup]]:
    """For each log the settings, what else they say as validation chose it."""
    tried: dict[str, dict[Group, list[SeedGroup]]] = {}
    for one in groups:
        tried.setdefault(one.dataset, {}).setdefault(setting_of(one), []).append(one)
    return {
        log: {name: picked for name, some in settings.items() if (picked := best(some))}
        for log, settings in tried.items()
    }


def make_pairs(groups: Iterable[SeedGroup]) -> Iterator[Row]:
    """Every setting against exact CE with the same backbone, and against SCE with SASRec."""
    for settings in chosen(groups).values():
        for setting, ours in settings.items():
            for other in ((setting[0], "ce"), (DEFAULT_BACKBONE, "sce")):
                theirs = settings.get((*other, None, None))
                pair = Pair.of(ours, theirs) if theirs not in (None, ours) else None
                if pair is not None and pair.ratio(TEST) is not None:
                    yield pair.row()


def ranks_of(group: SeedGroup, split: str) -> list[NDArray[np.int32]]:
    """The ranks of a split's targets in each run; empty if any run has not stored them."""
    found = [
        read_ranks(Path(row["directory"]), row[f"{split}_ranks"], split)
        for row in group.rows
        if row.get(f"{split}_ranks") and row.get("directory")
    ]
    real = [ranks for ranks in found if ranks is not None]
    return real if len(real) == len(group.rows) else []


def interval_of(
    ours: SeedGroup, theirs: SeedGroup, split: str = "test"
) -> tuple[float, float] | str | None:
    """The interval over users, or why there is none; None where the ranks are not stored."""
    ranks = ranks_of(ours, split), ranks_of(theirs, split)
    if len({len(one) for side in ranks for one in side}) > 1:
        return "they were evaluated on other users"
    return relative_interval(*ranks) if all(ranks) else None


def relative_interval(ours: Ranks, theirs: Ranks, seed: int = 0) -> tuple[float, float] | str:
    """95 % interval of the relative change in NDCG@10, over the same users drawn again and again.

    Why there is none, where fewer than 20 users have another NDCG@10 with one side than with the
    other, or the others have no hit.
    """
    # Users with the same gains are interchangeable: there are few kinds, however many users.
    mine, my_kinds = np.unique(_gains(ours), return_inverse=True)
    yours, your_kinds = np.unique(_gains(theirs), return_inverse=True)
    pairs, counts = np.unique(my_kinds * len(yours) + your_kinds, return_counts=True)
    gains = mine[pairs // len(yours)], yours[pairs % len(yours)]
    if (differ := counts[gains[0] != gains[1]].sum()) < LEAST:
        return f"NDCG@10 differs for {differ} of them, fewer than {LEAST}"
    random, changes = np.random.default_rng(seed), np.empty(RESAMPLES)
    step = max(1, _AT_ONCE // len(pairs))
    for first in range(0, RESAMPLES, step):
        part = changes[first : first + step]
        weights = random.multinomial(counts.sum(), counts / counts.sum(), size=len(part))
        one, other = (weights @ gain for gain in gains)
        if not other.all():
            return f"{counts[gains[1] > 0].sum()} of them have a hit with the other, too few"
        part[:] = one / other - 1
    low, high = np.percentile(changes, [2.5, 97.5])
    return float(low), float(high)


def _gains(ranks: Ranks) -> NDArray[np.float64]:
    """NDCG@10 of each user, averaged over seeds."""
    table = np.append(0.0, 1 / np.log2(np.arange(2, DEPTH + 2)))
    total = sum(table[np.where(one <= DEPTH, one, 0)] for one in ranks)
    return np.asarray(total / len(ranks)).round(12)  # sums in another order are the same
