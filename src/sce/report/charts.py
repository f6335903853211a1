"""The charts of sweeps, one function for each kind; CHARTS is the table of them."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import altair as alt
import polars as pl

from sce.experiments.figure_spec import MEASURES, FigureSpec
from sce.losses import LOSSES
from sce.report.drawing import (
    DASHES,
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
from sce.report.frame import (
    METRICS,
    WHOLE_PROCESS,
    Group,
    SeedGroup,
    all_conditions,
    best,
    comparable,
    datasets_of,
    describe,
    front,
    group_by,
    is_resident,
    is_validated,
    left_out,
    name_group,
    varied,
)
from sce.units import (
    is_number,
    plural,
    show_count,
    show_digits,
    show_duration,
    show_memory,
    show_metric,
    show_share,
)

COMPONENTS = {
    "weights": "weights",
    "optimizer": "optimizer state",
    "activations": "activations",
    "gradients": "gradients",
    "loss": "loss (logits)",
    "backward": "rest of backward",
}
_COURSES: dict[str, tuple[str, Callable[[float | None], str], Axis]] = {
    "picked_once": ("states picked once", show_share, Axis("", ".0%", zero=True)),
    "placed": ("states in any bucket", show_share, Axis("", ".0%", zero=True)),
    "correct_in_bucket": ("correct items in their buckets", show_share, Axis("", ".0%", zero=True)),
    "loss": ("training loss", show_digits, Axis("")),
    "validation.ndcg@10": ("validation NDCG@10", show_metric, Axis("", zero=True)),
}
_MEASURES = {
    "memory": ("peak training memory", ", MiB", "~s", show_memory),
    "time": ("training time", ", seconds", "~s", show_duration),
    "speed": ("training speed", ", tokens per second", "~s", show_count),
}
_WIDE = 4.0  # times the smallest: a logarithmic axis of costs from here on
_LARGEST = 200.0  # area of the largest dot
EPOCHS = Axis("epoch", whole=True)


def make_figures(groups: Sequence[SeedGroup], view: FigureSpec) -> Iterator[Figure]:
    """Draw a view: a figure for each dataset, or one across all of them."""
    chosen = [group for group in groups if not view.losses or group.loss in view.losses]
    draw = CHARTS[view.kind]
    if view.kind == "line" and view.x == "items":
        found = [draw(chosen, view, "")]
    else:
        found = [
            draw([group for group in chosen if group.dataset == dataset], view, dataset)
            for dataset in datasets_of(chosen)
        ]
    yield from (figure for figure in found if figure is not None)


def pareto(groups: Sequence[SeedGroup], view: FigureSpec, dataset: str) -> Figure | None:
    """Quality against memory or time, with the Pareto front of each curve."""
    cost = view.x or "memory"
    alike = comparable(groups)
    named = group_by(alike, view.by)
    names, curves = varied(alike), []
    prices = [price for one in alike if (price := one.mean(cost)) is not None]
    largest = max((one.mean("memory") or 0.0 for one in alike), default=0.0)
    told: list[list[str]] = []
    for group, members in named.items():
        chosen = front(members, cost)
        points = []
        for one in sorted(members, key=lambda one: one.mean(cost) or 0.0):
            price, value, memory = (one.mean(name) for name in (cost, view.y, "memory"))
            if price is None or value is None:
                continue
            size = {} if cost == "memory" else {"size": _area(memory, largest)}
            faint = not any(one is other for other in chosen)
            row = _tell(one, names)
            told.append(row)
            points.append(
                Point(price, value, _hover(row), one.spread(view.y) or 0.0, faint=faint, **size)
            )
        curves.append(_curve(named, group, view, points))
    if not any(curve.points for curve in curves):
        return None
    text = view.text or (
        "Joined: no setting as cheap did better on validation events."
        + (" The area of a dot is in proportion to its memory." if cost == "time" else "")
    )
    wide = "x" in view.log or max(prices) > _WIDE * min(prices) > 0
    return Figure(
        view.title or f"{dataset}: {name_measure(view.y)} against {name_measure(cost)}",
        " ".join([text, *_caveats(groups, view)]),
        _in_words(curves, name_measure(view.y)),
        draw_curves(curves, measure_axis(cost, log=wide), _y_axis(view), extended=True),
        _HEADS,
        told,
    )


def line(groups: Sequence[SeedGroup], view: FigureSpec, dataset: str) -> Figure | None:
    """A measure against one setting, or against the size of the catalogue."""
    alike = comparable(groups)
    named = group_by(alike, view.by)
    names, curves = varied(alike), []
    told: list[list[str]] = []
    several = False
    for group, members in named.items():
        by_x: dict[float, list[SeedGroup]] = {}
        for member in members:
            at = member.value(view.x)
            if is_number(at):
                by_x.setdefault(at, []).append(member)
        points, level = [], None
        for at, here in sorted(by_x.items()) or [(math.nan, members)]:
            several |= len(here) > 1
            one = _drawn(here, view)
            value = None if one is None else one.mean(view.y)
            if one is None or value is None:
                continue
            row = _tell(one, names, "" if dataset else f"{show_count(at)} items")
            told.append(row)
            if by_x:
                points.append(Point(at, value, _hover(row), one.spread(view.y) or 0.0))
            else:  # a loss without this setting is a level across
                level = Curve("", level=value, spread=one.spread(view.y) or 0.0)
        if points or level:
            curves.append(_curve(named, group, view, points, level))
    if not any(curve.points for curve in curves):
        return None
    label = "items in the catalogue" if view.x == "items" else view.x.rpartition(".")[2]
    title = f"{name_measure(view.y)} against {label}"
    return Figure(
        view.title or (f"{dataset}: {title}" if dataset else title.capitalize()),
        " ".join([view.text, *_caveats(groups, view, several=several)]).strip(),
        _in_words(curves, name_measure(view.y)),
        draw_curves(curves, Axis(label, "~s", log="x" in view.log), _y_axis(view)),
        _HEADS,
        told,
    )


def epochs(groups: Sequence[SeedGroup], view: FigureSpec, dataset: str) -> Figure | None:
    """A number over the epochs, as long as all seeds of the best setting went on."""
    title, show, axis = _COURSES[view.y]
    named = group_by(groups, view.by)
    curves = []
    for group, members in named.items():
        chosen = best(members)
        histories = [row.get("history") or {} for row in chosen.rows] if chosen else []
        columns = [history[view.y] for history in histories if view.y in history]
        points = []
        for epoch, values in enumerate(zip(*columns, strict=False), 1):  # to the shortest
            real = [value for value in values if value is not None]
            if real:
                spread = statistics.stdev(real) if len(real) > 1 else 0.0
                points.append(Point(epoch, statistics.fmean(real), spread=spread))
        if points:
            curves.append(_curve(named, group, view, points))
    if not curves:
        return None
    axis = Axis(title, axis.format, zero=axis.zero)
    heads, numbers = course_table(curves, show)
    return Figure(
        view.title or f"{dataset}: {title}",
        view.text,
        _in_words(curves, title),
        draw_curves(curves, EPOCHS, axis, area=True),
        heads,
        numbers,
    )


def components(groups: Sequence[SeedGroup], view: FigureSpec, dataset: str) -> Figure | None:
    """The peak memory of a step as stacked bars: shares of its components, and their sum."""
    alike = comparable(groups)
    named = group_by(alike, view.by)
    bars: dict[str, list[float]] = {}
    for group, members in named.items():
        parts = [
            [one.mean(f"components_mib.{part}") or 0.0 for part in COMPONENTS] for one in members
        ]
        if any(map(any, parts)):
            bars[name_group(view.by, group, named)] = max(parts, key=sum)
    if not bars:
        return None
    text = view.text or f"At the peak of a step; {show_count(alike[0].items)} items."
    if not view.text and is_resident(alike):
        text += " Bytes of live tensors, not of the process: there was no GPU."
    heads = ["loss", *COMPONENTS.values(), "sum"]
    numbers = [
        [bar, *map(show_memory, sizes), show_memory(sum(sizes))] for bar, sizes in bars.items()
    ]
    return Figure(
        view.title or f"{dataset}: memory by component",
        " ".join([text, *left_out(groups)]),
        "; ".join(f"{bar} {show_memory(sum(sizes))}" for bar, sizes in bars.items()) + ".",
        _stack(bars),
        heads,
        numbers,
    )


def _stack(bars: dict[str, list[float]]) -> alt.TopLevelMixin:
    frame = pl.DataFrame(
        [
            {"bar": bar, "name": name, "order": order, "share": size / sum(sizes),
             "told": f"{bar}, {name}: {show_memory(size)}, {show_share(size / sum(sizes))}"}
            for bar, sizes in bars.items()
            for order, (name, size) in enumerate(zip(COMPONENTS.values(), sizes, strict=True))
        ]
    )  # fmt: skip
    sums = pl.DataFrame({"bar": list(bars), "sum": [show_memory(sum(s)) for s in bars.values()]})
    y = alt.Y(
        "bar:N", sort=list(bars), title=None, axis=alt.Axis(labelColor=INK, labelFontWeight=600)
    )
    x = alt.X("share:Q", title="share of the peak", scale=alt.Scale(domain=[0, 1]),
              axis=alt.Axis(format=".0%", tickCount=5, grid=True))  # fmt: skip
    colour = colours(list(zip(COMPONENTS.values(), PALETTE, strict=False)), "square")
    stacked = alt.Chart(frame).mark_bar(size=22, aria=True).encode(
        x=x, y=y, color=colour, order="order:O", description="told:N"
    )  # fmt: skip
    text = alt.Chart(sums).mark_text(align="left", dx=6, color=SOFT, fontSize=11.5)
    summed = text.encode(y=y, x=alt.value(WIDTH - 70), text="sum:N")
    return alt.layer(stacked, summed).properties(width=WIDTH - 70, height=alt.Step(34))


# A new kind of figure is a function above, a line here, and its name in experiments.
CHARTS: dict[str, Callable[[Sequence[SeedGroup], FigureSpec, str], Figure | None]] = {
    "pareto": pareto,
    "line": line,
    "epochs": epochs,
    "components": components,
}

_HEADS = ("setting", "test NDCG@10", "validation NDCG@10", "peak memory", "training time", "seeds")


def name_measure(value: str) -> str:
    """A measure as people say it: "test.ndcg@10" is test NDCG@10."""
    if value in _MEASURES:
        return _MEASURES[value][0]
    split, _, metric = value.partition(".")
    kind, _, depth = metric.partition("@")
    return f"{split} {METRICS.get(kind, kind)}" + (f"@{depth}" if depth else "")


def measure_axis(name: str, *, log: bool) -> Axis:
    """The axis of a measure, with its unit."""
    if name in _MEASURES:
        title, unit, format_, _ = _MEASURES[name]
        return Axis(title + unit, format_, log=log)
    return Axis(name_measure(name), log=log)


def _y_axis(view: FigureSpec) -> Axis:
    return measure_axis(view.y, log="y" in view.log)


def course_table(
    curves: Sequence[Curve], show: Callable[[float | None], str]
) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of curves over epochs: a row for each epoch, a column for each curve."""
    values = [{p.x: show(p.y) + (f" ± {show(p.spread)}" if p.spread else "") for p in curve.points}
              for curve in curves]  # fmt: skip
    epochs = sorted({x for column in values for x in column})
    rows = [[f"{x:g}", *(column.get(x, "–") for column in values)] for x in epochs]
    return ["epoch", *(curve.name for curve in curves)], rows


def _tell(one: SeedGroup, names: Sequence[str], more: str = "") -> list[str]:
    shown = [("test.ndcg@10", show_metric), ("validation.ndcg@10", show_metric),
             ("memory", show_memory), ("time", show_duration)]  # fmt: skip
    label = ", ".join(filter(None, [describe(one, names), more]))
    return [label, *(one.show(name, show) for name, show in shown), str(len(one.rows))]


def _hover(row: Sequence[str]) -> str:
    pairs = [f"{head} {cell}" for head, cell in zip(_HEADS, row, strict=True) if cell != "–"]
    return "\n".join([row[0], *pairs[1:]])


def _curve(
    named: dict[Group, list[SeedGroup]],
    group: Group,
    view: FigureSpec,
    points: Sequence[Point],
    level: Curve | None = None,
) -> Curve:
    """Losses have their own colours; of two settings one has the colour, the other the dash."""
    dash, colour = 0, PALETTE[list(named).index(group) % len(PALETTE)]
    if len(group) > 1:
        firsts, others = (list(dict.fromkeys(one[part] for one in named))
                          for part in (slice(1), slice(1, None)))  # fmt: skip
        colour = PALETTE[firsts.index(group[:1]) % len(PALETTE)]
        dash = others.index(group[1:]) % len(DASHES)
    if isinstance(group[0], str) and group[0] in LOSSES:
        colour = loss_colour(group[0])
    found: dict[str, Any] = {"level": level.level, "spread": level.spread} if level else {}
    return Curve(name_group(view.by, group, named), points, colour, dash, **found)


def _area(memory: float | None, largest: float) -> float:
    """The area of a dot, in proportion to memory; the smallest can still be seen."""
    return _LARGEST / 4 if memory is None else max(12.0, _LARGEST * memory / largest)


def _drawn(groups: Sequence[SeedGroup], view: FigureSpec) -> SeedGroup | None:
    """Which of several settings at one place is drawn: without validation, the highest."""
    if is_validated(groups):
        return best(groups)
    return max(groups, key=lambda one: one.mean(view.y) or 0.0, default=None)


def _caveats(
    groups: Sequence[SeedGroup], view: FigureSpec, *, several: bool = False
) -> Iterator[str]:
    """Sentences that a reader of the figure needs."""
    if several:
        rule = "best by validation" if is_validated(groups) else "one that reaches highest"
        yield f"Of settings at one place, the {rule} is drawn."
    alike = comparable(groups)
    if (view.kind == "pareto" or view.y == "memory") and is_resident(alike):
        yield WHOLE_PROCESS
    if view.kind == "pareto" or view.y in MEASURES:
        yield from left_out(groups)
        gone = sum(
            bool(all_conditions([before])) and not all_conditions([after])
            for before, after in zip(groups, alike, strict=True)
        )
        if gone:
            yield f"{plural(gone, 'setting')} with no other run cannot be drawn."


def _in_words(curves: Sequence[Curve], measure: str) -> str:
    """The reach of each curve."""
    words = []
    for curve in curves:
        values = [p.y for p in curve.points if not p.faint and p.y is not None]
        if curve.level is not None:
            values = [curve.level]
        if values:
            low, high = show_digits(min(values)), show_digits(max(values))
            words.append(f"{curve.name} {low if low == high else f'{low} to {high}'}")
    return f"{measure}: {'; '.join(words)}."
