"""The charts of sweeps, one function for each kind; `CHARTS` in figure_spec.py lists them."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import NamedTuple

import altair as alt
import polars as pl

from sce import units
from sce.experiments.figure_spec import CHARTS, HISTORY, MEASURES, FigureSpec
from sce.losses import LOSSES
from sce.report import frame
from sce.report.drawing import (
    DASHES,
    EPOCHS,
    INK,
    PALETTE,
    SOFT,
    WIDTH,
    Axis,
    Curve,
    Figure,
    Point,
    colours,
    draw_curves,
    loss_colour,
)
from sce.report.frame import SCORE, TOLD, Group, SeedGroup, Show, name_metric
from sce.report.record import PHASES

COMPONENTS = {"weights": "weights", "optimizer": "optimizer state", "activations": "activations",
              "gradients": "gradients", "loss": "loss (logits)", "backward": "rest of backward",
}  # fmt: skip
_SHARE = Axis("share", ".0%", zero=True)


class Course(NamedTuple):
    """A chart of numbers over the epochs, of a run and of sweeps."""

    title: str
    lines: Mapping[str, tuple[str, ...]]
    """Where the numbers of each line are in the notes of an epoch."""
    show: Show
    axis: Axis
    text: str = ""
    section: str = ""  # section of a run's page; empty: only in sweeps


# A new chart of epochs is an entry here, by the name that sweeps know it by.
COURSES = {
    "loss": Course("training loss", {"loss": HISTORY["loss"]}, units.show_digits, Axis("loss"),
                   "Mean of the epoch", "Learning"),
    SCORE: Course("validation NDCG@10", {"NDCG@10": HISTORY[SCORE]}, units.show_metric,
                  Axis("NDCG@10", zero=True),
                  "Each test user's last event but one, in a ranking of the whole catalogue",
                  "Learning"),
    "seconds": Course("time per epoch", {phase: ("seconds", phase) for phase in PHASES},
                      units.show_duration, Axis("seconds", zero=True), "Seconds",
                      "Memory and time"),
    "speed": Course("training speed", {"tokens per second": ("tokens_per_second",)},
                    units.show_count, Axis("tokens per second", "s", zero=True),
                    "Tokens without padding", "Memory and time"),
    "picked_once": Course("states picked once",
                          {"in exactly one bucket": HISTORY["picked_once"],
                           "in any bucket": HISTORY["placed"]}, units.show_share, _SHARE,
                          "Share of a batch's states; one that is in many buckets takes others' "
                          "places", "Buckets"),
    "occupied": Course("buckets with any state", {"any state": HISTORY["occupied"]},
                       units.show_share, _SHARE,
                       "Share of the buckets that any state of the batch is in", "Buckets"),
    "placed": Course("states in any bucket", {}, units.show_share, _SHARE),
    "correct_in_bucket": Course("correct items in their buckets",
                                {"correct item": HISTORY["correct_in_bucket"]}, units.show_share,
                                _SHARE, "Share of bucket rows whose own correct item is among the "
                                "bucket's items", "Buckets"),
}  # fmt: skip
_WIDE = 4.0  # times the smallest: a logarithmic axis of costs from here on
_LARGEST = 200.0  # area of the largest dot


def make_figures(groups: Sequence[SeedGroup], spec: FigureSpec) -> list[Figure]:
    """Draw a spec: a figure for each dataset, or one across all of them."""
    chosen = [group for group in groups if not spec.losses or group.loss in spec.losses]
    draw: Callable[..., Figure | None] = resolve_name(CHARTS[spec.kind].draw)
    found = [
        draw([group for group in chosen if dataset in ("", group.dataset)], spec, dataset)
        for dataset in ([""] if spec.x == "items" else frame.datasets_of(chosen))
    ]
    return [figure for figure in found if figure is not None]


def pareto(groups: Sequence[SeedGroup], spec: FigureSpec, dataset: str) -> Figure | None:
    """Quality against memory or time, with the Pareto front of each curve where costs compare."""
    cost = spec.x or "memory"
    ranked = frame.is_ranked(cost, [row for one in groups for row in one.rows])
    named, names = frame.group_by(groups, spec.by), frame.varied(groups)
    largest = max((one.mean("memory") or 0.0 for one in groups), default=0.0)
    told: list[list[str]] = []
    curves, prices = [], []
    for group, members in named.items():
        joined, points = frame.front(members, cost) if ranked else members, []
        for one in sorted(members, key=lambda one: one.mean(cost) or 0.0):
            price, value, memory = (one.mean(name) for name in (cost, spec.y, "memory"))
            if price is None or value is None:
                continue
            prices.append(price)
            told.append(frame.tell(one, names))
            area = Point.size
            if cost == "time":  # in proportion to memory; the smallest can still be seen
                area = max(12.0, _LARGEST * memory / largest) if memory else _LARGEST / 4
            spread = one.spread(spec.y) or 0.0
            points.append(Point(price, value, _hover(told[-1]), spread, one not in joined, area))
        curves.append(_curve(named, group, spec, points))
    if not prices:
        return None
    text = "Joined: no setting as cheap did better on validation events. " if ranked else ""
    text += "The area of a dot is in proportion to its memory." if cost == "time" else ""
    wide = "x" in spec.log or max(prices) > _WIDE * min(prices) > 0
    return Figure(
        spec.title or f"{dataset}: {_name(spec.y)} against {_name(cost)}",
        spec.text or text.strip(),
        in_words(curves, _name(spec.y)),
        draw_curves(curves, _axis(cost, wide), _axis(spec.y, "y" in spec.log), front=ranked),
        TOLD,
        told,
    )


def line(groups: Sequence[SeedGroup], spec: FigureSpec, dataset: str) -> Figure | None:
    """A measure against one setting, or against the size of the catalogue."""
    named, names = frame.group_by(groups, spec.by), frame.varied(groups)
    curves: list[Curve] = []
    told: list[list[str]] = []
    several = False
    for group, members in named.items():
        by_x: dict[float, list[SeedGroup]] = {}
        placed = [member for member in members if units.is_number(member.value(spec.x))]
        for member in placed or members:
            by_x.setdefault(member.value(spec.x) if placed else math.nan, []).append(member)
        points, level = [], None
        for at, here in sorted(by_x.items()):
            several |= len(here) > 1
            one = max(
                frame.with_most_seeds(here), key=lambda one: (one.score, one.mean(spec.y) or 0.0)
            )
            value = one.mean(spec.y)
            if value is not None:
                told.append(
                    frame.tell(one, names, "" if dataset else f"{units.show_count(at)} items")
                )
                point = Point(at, value, _hover(told[-1]), one.spread(spec.y) or 0.0)
                if math.isnan(at):  # a loss without this setting is a level across
                    level = point
                else:
                    points.append(point)
        if points or level:
            curves.append(_curve(named, group, spec, points, level))
    if not any(curve.points for curve in curves):
        return None
    label = "items in the catalogue" if spec.x == "items" else spec.x.rpartition(".")[2]
    title = f"{_name(spec.y)} against {label}"
    choice = "Of settings at one place, the best by validation is drawn." if several else ""
    return Figure(
        spec.title or (f"{dataset}: {title}" if dataset else title.capitalize()),
        f"{spec.text} {choice}".strip(),
        in_words(curves, _name(spec.y)),
        draw_curves(curves, Axis(label, "s", log="x" in spec.log), _axis(spec.y, "y" in spec.log)),
        TOLD,
        told,
    )


def epochs(groups: Sequence[SeedGroup], spec: FigureSpec, dataset: str) -> Figure | None:
    """A number over the epochs, as long as all seeds of the best setting went on."""
    title, _, show, axis, *_ = COURSES[spec.y]
    named = frame.group_by(groups, spec.by)
    curves = []
    for group, members in named.items():
        chosen = frame.best(members)
        histories = [row.get("history") or {} for row in chosen.rows] if chosen else []
        columns = [history[spec.y] for history in histories if spec.y in history]
        points = []
        for epoch, values in enumerate(zip(*columns, strict=False), 1):  # to the shortest
            real = [value for value in values if value is not None]
            if real:
                spread = statistics.stdev(real) if len(real) > 1 else 0.0
                points.append(Point(epoch, statistics.fmean(real), spread=spread))
        if points:
            curves.append(_curve(named, group, spec, points))
    if not curves:
        return None
    cells = [
        {p.x: frame.show_around(p.y, p.spread or None, show) for p in curve.points}
        for curve in curves
    ]
    return Figure(
        spec.title or f"{dataset}: {title}",
        spec.text,
        in_words(curves, title, show),
        draw_curves(curves, EPOCHS, axis, area=True),
        ["epoch", *(curve.name for curve in curves)],
        [[f"{x:g}", *(one.get(x, "–") for one in cells)] for x in sorted(set().union(*cells))],
    )


def components(groups: Sequence[SeedGroup], spec: FigureSpec, dataset: str) -> Figure | None:
    """The peak memory of a step as stacked bars: shares of its components, and their sum."""
    named = frame.group_by(groups, spec.by)
    bars: dict[str, list[float]] = {}
    for group, members in named.items():
        parts = [
            [one.mean(f"components_mib.{part}") or 0.0 for part in COMPONENTS] for one in members
        ]
        if any(map(any, parts)):
            bars[frame.name_group(spec.by, group, named)] = max(parts, key=sum)
    if not bars:
        return None
    text = f"At the peak of a step; {units.show_count(groups[0].value('items'))} items."
    if frame.is_resident(row for one in groups for row in one.rows):
        text += " Bytes of live tensors, not of the process: there was no GPU."
    sums = {bar: units.show_memory(sum(sizes)) for bar, sizes in bars.items()}
    return Figure(
        spec.title or f"{dataset}: memory by component",
        spec.text or text,
        "; ".join(f"{bar} {total}" for bar, total in sums.items()) + ".",
        _stack(bars, sums),
        ["loss", *COMPONENTS.values(), "sum"],
        [[bar, *map(units.show_memory, sizes), sums[bar]] for bar, sizes in bars.items()],
    )


def _stack(bars: Mapping[str, list[float]], sums: Mapping[str, str]) -> alt.TopLevelMixin:
    shares = pl.DataFrame(
        [
            {"bar": bar, "name": name, "order": order, "share": (share := size / sum(sizes)),
             "told": f"{bar}, {name}: {units.show_memory(size)}, {units.show_share(share)}"}
            for bar, sizes in bars.items()
            for order, (name, size) in enumerate(zip(COMPONENTS.values(), sizes, strict=True))
        ]
    )  # fmt: skip
    y = alt.Y(
        "bar:N", sort=list(bars), title=None, axis=alt.Axis(labelColor=INK, labelFontWeight=600)
    )
    x = alt.X("share:Q", title="share of the peak", scale=alt.Scale(domain=[0, 1]),
              axis=alt.Axis(format=".0%", tickCount=5, grid=True))  # fmt: skip
    colour = colours(list(zip(COMPONENTS.values(), PALETTE, strict=False)), "square")
    stacked = alt.Chart(shares).mark_bar(size=22, aria=True).encode(
        x=x, y=y, color=colour, order="order:O", description="told:N"
    )  # fmt: skip
    totals = pl.DataFrame({"bar": list(sums), "sum": list(sums.values())})
    text = alt.Chart(totals).mark_text(align="left", dx=6, color=SOFT, fontSize=11.5)
    summed = text.encode(y=y, x=alt.value(WIDTH - 70), text="sum:N")
    return alt.layer(stacked, summed).properties(width=WIDTH - 70, height=alt.Step(34))


def _name(measure: str) -> str:
    """A measure as people say it: "test.ndcg@10" is test NDCG@10."""
    split, _, metric = measure.partition(".")
    return MEASURES[measure].label if measure in MEASURES else f"{split} {name_metric(metric)}"


def _axis(measure: str, log: bool) -> Axis:
    if measure in MEASURES:
        return Axis(f"{_name(measure)}, {MEASURES[measure].unit}", "s", log=log)
    return Axis(_name(measure), log=log)


def _hover(row: Sequence[str]) -> str:
    pairs = list(zip(TOLD, row, strict=True))[1:]
    return "\n".join([row[0], *(f"{head} {cell}" for head, cell in pairs if cell != "–")])


def _curve(
    named: Mapping[Group, list[SeedGroup]],
    group: Group,
    spec: FigureSpec,
    points: Sequence[Point],
    level: Point | None = None,
) -> Curve:
    """Losses have their own colours; of two settings one has the colour, the other the dash."""
    firsts, others = (list(dict.fromkeys(one[part] for one in named))
                      for part in (slice(1), slice(1, None)))  # fmt: skip
    colour = PALETTE[firsts.index(group[:1]) % len(PALETTE)]
    if group[0] in LOSSES:
        colour = loss_colour(group[0])
    dash = others.index(group[1:]) % len(DASHES)
    return Curve(frame.name_group(spec.by, group, named), points, colour, dash, level)


def in_words(curves: Sequence[Curve], measure: str, show: Show = units.show_digits) -> str:
    """The reach of each curve."""
    words = []
    for curve in curves:
        points = [curve.level] if curve.level else [p for p in curve.points if not p.faint]
        ends = dict.fromkeys(show(end(p.y for p in points)) for end in (min, max) if points)
        words += [f"{curve.name} {' to '.join(ends)}"] if ends else []
    return f"{measure}: {'; '.join(words)}."
