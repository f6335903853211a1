"""Figures of a comparison as SVG: curves of points with spreads, bands, and stacked bars.

A curve can be hidden by a click on its name, and every point tells what it is: that is page work,
done by compare.js with what stands here in `data-` attributes. Colours are classes.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sce.report.figures import Caption
from sce.report.formatting import show_share
from sce.report.markup import Child, Markup, element, join
from sce.report.scales import Axis, Scale, lay_out

WIDTH, HEIGHT = 460.0, 290.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 14.0, 12.0, 42.0  # room around the plot
_LETTER = 6.2  # about the width of one
_BAR, _GAP = 22.0, 12.0  # of stacked bars
_NAMES = 58.0  # room for the names of bars
COLOURS = 10
DASHES = ("", "7 4", "2 4", "9 3 2 3")


@dataclass(frozen=True)
class Point:
    """A measured place."""

    x: float
    y: float
    label: str
    rows: tuple[tuple[str, str], ...] = ()
    """Names and values to be told beside the label."""
    spread: float = 0.0
    """Above and below."""
    radius: float = 3.5
    faint: bool = False
    """Not worth much notice: beside the line."""


@dataclass(frozen=True)
class Curve:
    """Points of one colour; those that are not faint are joined."""

    name: str
    points: Sequence[Point]
    colour: int
    dash: int = 0
    area: bool = False
    """Draw the spread as an area, and no dots."""
    extended: bool = False
    """Draw on to the right edge, dashed: nothing that costs more is better."""
    level: float | None = None
    """Instead of points: the same everywhere, give or take `level_spread`."""
    level_spread: float = 0.0


@dataclass(frozen=True)
class Chart:
    """A figure of curves."""

    caption: Caption
    x: Axis
    y: Axis
    curves: Sequence[Curve]


@dataclass(frozen=True)
class Stack:
    """A bar of parts."""

    name: str
    parts: Sequence[float]


@dataclass(frozen=True)
class Stacks:
    """A figure of stacked bars, all of the same parts."""

    caption: Caption
    show: Callable[[float], str]
    """A size as text."""
    parts: Sequence[str]
    stacks: Sequence[Stack]


@dataclass(frozen=True)
class Drawn:
    """A figure without its frame: what is in the SVG, and what the names beside it are."""

    caption: Caption
    inside: Markup
    height: float
    names: Sequence[tuple[str, int, int]]  # name, colour, dash
    points: Sequence[dict[str, object]]


def draw_chart(chart: Chart) -> Drawn:
    """Draw curves over two axes."""
    points = [point for curve in chart.curves for point in curve.points]
    levels = [
        curve.level + sign * curve.level_spread
        for curve in chart.curves
        if curve.level is not None
        for sign in (-1, 1)
    ]
    x = lay_out(chart.x, [point.x for point in points], begin=_LEFT, end=WIDTH - _RIGHT, ticks=6)
    reach = [point.y + sign * point.spread for point in points for sign in (-1, 1)]
    y = lay_out(chart.y, reach + levels, begin=HEIGHT - _BOTTOM, end=_TOP)
    told: list[dict[str, object]] = []
    drawn = []
    for number, curve in enumerate(chart.curves):
        drawn.append(_curve(curve, number, x, y))
        told += _told(curve, number, x, y)
    told.sort(key=lambda one: float(str(one["x"])))
    inside = join(_grid(x, y), drawn)
    names = [(curve.name, curve.colour, curve.dash) for curve in chart.curves]
    return Drawn(chart.caption, inside, HEIGHT, names, told)


def draw_stacks(chart: Stacks) -> Drawn:
    """Draw a bar for each stack, one under the other: the shares of its parts, and their sum."""
    height = _TOP + len(chart.stacks) * (_BAR + _GAP) + _BOTTOM
    room = WIDTH - _RIGHT - 9 * _LETTER  # for the sums
    x = lay_out(Axis("share of the peak", show_share), [0.0, 1.0], begin=_NAMES, end=room)
    texts: list[Markup] = []
    groups: list[list[Markup]] = [[] for _ in chart.parts]
    told: list[dict[str, object]] = []
    for place, stack in enumerate(chart.stacks):
        total = sum(stack.parts)
        top = _TOP + place * (_BAR + _GAP)
        middle = top + _BAR / 2
        texts.append(_text(stack.name, _NAMES - 7, middle + 4, "strong", "end"))
        texts.append(_text(chart.show(total), x.end + 6, middle + 4, "value", "start"))
        begin = 0.0
        for number, size in enumerate(stack.parts):
            share = size / total if total else 0.0
            left, right = x(begin), x(begin + share)
            bar = element("rect", class_="bar", x=left, y=top, width=right - left, height=_BAR)
            groups[number].append(bar)
            told.append(
                {
                    "x": round((left + right) / 2, 1),
                    "y": round(middle, 1),
                    "curve": number,
                    "label": f"{stack.name}: {chart.parts[number]}",
                    "rows": [[chart.show(size), f"{show_share(share)} of {chart.show(total)}"]],
                }
            )
            begin += share
    parts = [
        element("g", bars, class_=f"curve k{number + 1}", data_curve=str(number))
        for number, bars in enumerate(groups)
    ]
    names = [(name, number + 1, 0) for number, name in enumerate(chart.parts)]
    inside = join(_x_axis(x, _TOP, height - _BOTTOM), parts, texts)
    return Drawn(chart.caption, inside, height, names, told)


def _curve(curve: Curve, number: int, x: Scale, y: Scale) -> Markup:
    inside: list[Child] = []
    if curve.level is not None:
        inside += _level(curve, curve.level, x, y)
    shown = [point for point in curve.points if x.holds(point.x) and y.holds(point.y)]
    joined = [point for point in shown if not point.faint]
    dash = DASHES[curve.dash] or None
    if curve.area and any(point.spread for point in joined):
        inside.append(_area(joined, x, y))
    if len(joined) > 1:
        path = "M" + "L".join(f"{x(point.x):.1f},{y(point.y):.1f}" for point in joined)
        inside.append(element("path", class_="line", d=path, stroke_dasharray=dash))
    if curve.extended and joined and x(joined[-1].x) < x.end - 1:
        last = joined[-1]
        inside.append(
            element(
                "line",
                class_="line extended",
                x1=x(last.x),
                x2=x.end,
                y1=y(last.y),
                y2=y(last.y),
                stroke_dasharray="2 4",
            )
        )
    for point in shown:
        at, up = x(point.x), y(point.y)
        if point.spread and not curve.area and not point.faint:
            inside.append(_whisker(point, at, y))
        if not curve.area:
            inside.append(
                element(
                    "circle",
                    class_="dot faint" if point.faint else "dot",
                    cx=at,
                    cy=up,
                    r=point.radius,
                )
            )
    return element("g", *inside, class_=f"curve k{curve.colour}", data_curve=str(number))


def _level(curve: Curve, level: float, x: Scale, y: Scale) -> list[Child]:
    inside: list[Child] = []
    if curve.level_spread:
        top, foot = y(level + curve.level_spread), y(level - curve.level_spread)
        inside.append(
            element(
                "rect", class_="area", x=x.begin, y=top, width=x.end - x.begin, height=foot - top
            )
        )
    inside.append(
        element(
            "line",
            class_="line",
            x1=x.begin,
            x2=x.end,
            y1=y(level),
            y2=y(level),
            stroke_dasharray="6 4",
        )
    )
    return inside


def _area(points: Sequence[Point], x: Scale, y: Scale) -> Markup:
    above = [f"{x(p.x):.1f},{y(p.y + p.spread):.1f}" for p in points]
    below = [f"{x(p.x):.1f},{y(p.y - p.spread):.1f}" for p in reversed(points)]
    return element("polygon", class_="area", points=" ".join(above + below))


def _whisker(point: Point, at: float, y: Scale) -> Markup:
    top, foot = point.y + point.spread, point.y - point.spread
    if not (y.holds(top) and y.holds(foot)):
        return Markup("")
    return element("line", class_="whisker", x1=at, x2=at, y1=y(top), y2=y(foot))


def _told(curve: Curve, number: int, x: Scale, y: Scale) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    if curve.level is not None:
        label = f"{curve.name}: {y.axis.tell(curve.level)}"
        middle = round((x.begin + x.end) / 2, 1)
        found.append({"x": middle, "y": round(y(curve.level), 1), "curve": number, "label": label,
                      "rows": []})  # fmt: skip
    for point in curve.points:
        if x.holds(point.x) and y.holds(point.y):
            found.append(
                {
                    "x": round(x(point.x), 1),
                    "y": round(y(point.y), 1),
                    "curve": number,
                    "label": point.label,
                    "rows": [list(row) for row in point.rows],
                }
            )
    return found


def _grid(x: Scale, y: Scale) -> Markup:
    bottom = HEIGHT - _BOTTOM
    lines = [
        element("line", class_="grid", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y(value), y2=y(value))
        for value in y.ticks
    ]
    ticks = [_text(y.axis.show(v), _LEFT - 7, y(v) + 4, "tick", "end") for v in y.ticks]
    axis = element("line", class_="axis", x1=_LEFT, x2=WIDTH - _RIGHT, y1=bottom, y2=bottom)
    return join(lines, ticks, _x_axis(x, _TOP, bottom), axis)


def _x_axis(x: Scale, top: float, bottom: float) -> Markup:
    drawn, taken = [], -math.inf
    for value in x.ticks:
        label = x.axis.show(value)
        half = len(label) * _LETTER / 2
        middle = min(x(value), WIDTH - half)
        drawn.append(element("line", class_="grid", x1=x(value), x2=x(value), y1=top, y2=bottom))
        if middle - half >= taken:
            drawn.append(_text(label, middle, bottom + 16, "tick", "middle"))
            taken = middle + half + _LETTER
    middle = (x.begin + x.end) / 2
    return join(drawn, _text(x.axis.label, middle, bottom + 36, "label", "middle"))


def _text(content: str, x: float, y: float, class_: str, anchor: str) -> Markup:
    return element("text", content, class_=class_, x=x, y=y, text_anchor=anchor)


def as_figure(drawn: Drawn, key: str) -> Markup:
    """A figure of the page, with its names as switches."""
    return element(
        "figure",
        element(
            "figcaption",
            element("h3", drawn.caption.title),
            element("p", drawn.caption.text) if drawn.caption.text else None,
            _legend(drawn.names) if drawn.names else None,
        ),
        element(
            "svg",
            element("desc", drawn.caption.description or drawn.caption.text, id=f"desc-{key}"),
            drawn.inside,
            class_="chart",
            viewBox=f"0 0 {WIDTH:g} {drawn.height:g}",
            role="img",
            aria_label=drawn.caption.title,
            aria_describedby=f"desc-{key}",
            tabindex="0",
            data_points=json.dumps(drawn.points, separators=(",", ":"), ensure_ascii=False),
        ),
        class_="figure",
    )


def _legend(names: Sequence[tuple[str, int, int]]) -> Markup:
    return element(
        "div",
        [
            element(
                "button",
                element(
                    "svg",
                    _swatch(dash),
                    class_=f"swatch k{colour}",
                    viewBox="0 0 24 10",
                    aria_hidden="true",
                ),
                name,
                type_="button",
                aria_pressed="true",
                data_name=name,
            )
            for name, colour, dash in names
        ],
        class_="switches",
        role="group",
        aria_label="Show or hide",
    )


def _swatch(dash: int) -> Markup:
    return element(
        "line", class_="line", x1=1, x2=23, y1=5, y2=5, stroke_dasharray=DASHES[dash] or None
    )


def as_file(drawn: Drawn, style: str) -> str:
    """A figure as an SVG file of its own, with its title and names inside."""
    head: list[Markup] = [_text(drawn.caption.title, 12, 22, "title", "start")]
    left, top = 12.0, 42.0
    for name, colour, dash in drawn.names if len(drawn.names) > 1 else ():
        wide = 32 + (len(name) + 2) * _LETTER
        if left + wide > WIDTH:
            left, top = 12.0, top + 18
        sample = element(
            "line", class_="line", x1=left, x2=left + 22, y1=top - 4, y2=top - 4,
            stroke_dasharray=DASHES[dash] or None,
        )  # fmt: skip
        head.append(element("g", sample, class_=f"curve k{colour}"))
        head.append(_text(name, left + 27, top, "label", "start"))
        left += wide
    begin = top + 12 if len(drawn.names) > 1 else 34.0
    whole = element(
        "svg",
        element("style", Markup(style)),
        element("rect", class_="paper", width="100%", height="100%"),
        head,
        element("g", drawn.inside, transform=f"translate(0 {begin:g})"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH:g} {begin + drawn.height:g}",
        width=WIDTH,
        class_="chart",
    )
    return f"{whole}\n"
