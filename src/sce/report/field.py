"""Settings over several logs: which differences are larger than the spread.

Each is set against a reference by the ratio of NDCG@10 on the same log. How much these differ from
log to log contains what users and seeds do to them; so logs are drawn again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pvariance

from sce.models.registry import BACKBONES, DEFAULT_BACKBONE
from sce.report.frame import Group, SeedGroup, name_loss
from sce.report.pairs import Pair
from sce.report.tables import APART
from sce.units import show_duration, show_memory

REFERENCE: Group = (DEFAULT_BACKBONE, "ce", None, None)
LEAST_LOGS = 5
HEADS = ["backbone", "loss", "logs", "seeds", "mean rank", "ratio", "95 %", "against {}",
         "popular", "rare", "memory", "an epoch"]  # fmt: skip
ABOUT = (
    "Test NDCG@10 as a multiple of that of the reference on the same log: geometric means over "
    "seeds and logs, where 0 counts as half a hit. Better and worse are those whose interval "
    "excludes 1. It is by a bootstrap of logs, and of seeds within them, with the t distribution "
    "for their number: with few logs it is wide, with fewer than five there is none. Ranks are "
    "among the settings trained on a log; memory and time are medians over logs. Popular and rare "
    "targets are of the logs where every run has hits, as many as are in brackets, where not all."
)


@dataclass(frozen=True)
class Standing:
    """A setting over the logs that it was trained on."""

    setting: Group
    pairs: list[Pair] = field(default_factory=list)  # with the reference, one a log
    places: list[tuple[int, int]] = field(default_factory=list)  # from 1, and of how many settings

    @property
    def ratio(self) -> float:
        """The geometric mean over logs; each log is the mean of its seeds."""
        return math.exp(fmean(fmean(pair.changes()) for pair in self.pairs))

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the ratio; None with fewer than five logs, and of the reference."""
        if len(self.pairs) < LEAST_LOGS or self.setting == REFERENCE:
            return None
        spread = spread_over_logs([pair.changes() for pair in self.pairs])
        return self.ratio * math.exp(-spread), self.ratio * math.exp(spread)

    @property
    def verdict(self) -> str:
        """Whether the difference is larger than the spread."""
        if self.setting == REFERENCE:
            return ""
        if self.interval is None:
            return "too few logs"
        low, high = self.interval
        return "better" if low > 1 else "worse" if high < 1 else "within the spread"

    def part(self, kind: str) -> tuple[float, int] | None:
        """The ratio for popular or rare targets, and of how many logs: where they are apart."""
        found = [pair.changes(APART.format(kind)) for pair in self.pairs]
        means = [fmean(changes) for changes in found if changes]
        return (math.exp(fmean(means)), len(means)) if means else None


def spread_over_logs(changes: Sequence[Sequence[float]]) -> float:
    """Half of the 95 % interval of the mean over logs of means over seeds, given those of each log.

    The standard error is that of a bootstrap in two levels, which draws logs and then seeds of
    each, both with replacement; it has a formula. One log fewer is drawn than there are: else the
    error would be too small by √(1 - 1/n). It is taken as often as Student's t says for n logs.
    """
    between = pvariance([fmean(seeds) for seeds in changes])
    within = fmean(pvariance(seeds) / len(seeds) for seeds in changes)
    drawn = len(changes) - 1
    return _student(drawn) * math.sqrt((between + within) / drawn)


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by its series in 1 / freedom; from 4 on to 0.3 %."""
    return 1.959964 + 2.372271 / freedom + 2.822502 / freedom**2 + 2.555863 / freedom**3


def stand(logs: Mapping[str, Mapping[Group, SeedGroup]]) -> list[Standing]:
    """Every setting over the logs where the reference was trained too, the best ratio first.

    Those on too few logs for an interval come last.
    """
    found: dict[Group, Standing] = {}
    for settings in logs.values():
        reference = settings.get(REFERENCE)
        pairs = {
            name: pair
            for name, ours in settings.items()
            if reference is not None and (pair := Pair(ours, reference)).changes()
        }
        ranked = sorted(pairs, key=lambda name: -fmean(pairs[name].changes()))
        for place, name in enumerate(ranked, 1):
            standing = found.setdefault(name, Standing(name))
            standing.pairs.append(pairs[name])
            standing.places.append((place, len(ranked)))
    return sorted(found.values(), key=lambda one: (len(one.pairs) < LEAST_LOGS, -one.ratio))


def make_field(logs: Mapping[str, Mapping[Group, SeedGroup]]) -> tuple[list[str], list[list[str]]]:
    """Heads, and a row for each setting; none where the reference is missing."""
    against = name_setting(REFERENCE)
    return [head.format(" ".join(against)) for head in HEADS], [_tell(one) for one in stand(logs)]


def name_setting(setting: Group) -> tuple[str, str]:
    """Backbone and loss in words."""
    model, loss, negatives, cut = setting
    named = f"C{name_loss(loss)}" if cut else name_loss(loss)
    backbone = BACKBONES[model].label if model in BACKBONES else str(model)
    return backbone, f"{named}, {negatives}" if loss == "ce-" else named


def _tell(one: Standing) -> list[str]:
    seeds = [len(pair.ours.rows) for pair in one.pairs]
    fewest, most = min(seeds), max(seeds)
    places, of = map(fmean, zip(*one.places, strict=True))
    groups = [pair.ours for pair in one.pairs]
    epochs = [
        seconds / count
        for group in groups
        if (seconds := group.mean("time")) and (count := group.mean("epochs"))
    ]
    peaks = [peak for group in groups if (peak := group.mean("memory"))]
    return [
        *name_setting(one.setting),
        f"{len(one.pairs)}",
        f"{fewest}" if fewest == most else f"{fewest} to {most}",
        f"{places:.1f} of {of:.1f}",
        f"{one.ratio:.3f}",
        "–".join(f"{end:.3f}" for end in one.interval or ()),
        one.verdict,
        *(_tell_part(one.part(kind), len(one.pairs)) for kind in ("popular", "rare")),
        show_memory(median(peaks) if peaks else None),
        show_duration(median(epochs) if epochs else None),
    ]


def _tell_part(part: tuple[float, int] | None, logs: int) -> str:
    if part is None:
        return ""
    ratio, count = part
    return f"{ratio:.3f}" + (f" ({count})" if count < logs else "")
