"""Figures of a comparison as SVG: curves of points with spreads, and bands.

A curve can be hidden by a click on its name, and every point tells what it is: that is page work,
done by compare.js with what stands here in `data-` attributes. Colours are classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sce.experiments.axes import label_ticks
from sce.report.figures import Caption
from sce.report.markup import Child, Markup, element, join
from sce.report.scales import Axis, Scale, lay_out

WIDTH, HEIGHT = 460.0, 306.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 14.0, 28.0, 42.0  # room around the plot
LETTER = 6.2  # about the width of one
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

    @property
    def reach(self) -> tuple[float, float]:
        """From the mean less the spread to the mean and the spread."""
        return give_or_take(self.y, self.spread)


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
class Drawn:
    """A figure without its frame: what is in the SVG, and what the names beside it are."""

    caption: Caption
    inside: Markup
    height: float
    names: Sequence[tuple[str, int, int]]  # name, colour, dash
    points: Sequence[dict[str, object]]


def give_or_take(value: float, spread: float) -> tuple[float, float]:
    """The ends of a spread; what cannot be below nothing does not reach there by its spread."""
    low = value - spread
    return (0.0 if low < 0 <= value else low), value + spread


def draw_chart(chart: Chart) -> Drawn:
    """Draw curves over two axes."""
    points = [point for curve in chart.curves for point in curve.points]
    levels = [
        end
        for curve in chart.curves
        if curve.level is not None
        for end in give_or_take(curve.level, curve.level_spread)
    ]
    x = lay_out(chart.x, [point.x for point in points], begin=LEFT, end=WIDTH - RIGHT, ticks=6)
    reach = [end for point in points for end in point.reach]
    y = lay_out(chart.y, reach + levels, begin=HEIGHT - BOTTOM, end=TOP)
    told: list[dict[str, object]] = []
    drawn = []
    for number, curve in enumerate(chart.curves):
        drawn.append(_curve(curve, number, x, y))
        told += _told(curve, number, x, y)
    told.sort(key=lambda one: float(str(one["x"])))
    inside = join(_grid(x, y), drawn)
    names = [(curve.name, curve.colour, curve.dash) for curve in chart.curves]
    return Drawn(chart.caption, inside, HEIGHT, names, told)


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
        foot, top = map(y, give_or_take(level, curve.level_spread))
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
    above = [f"{x(p.x):.1f},{y(p.reach[1]):.1f}" for p in points]
    below = [f"{x(p.x):.1f},{y(p.reach[0]):.1f}" for p in reversed(points)]
    return element("polygon", class_="area", points=" ".join(above + below))


def _whisker(point: Point, at: float, y: Scale) -> Markup:
    foot, top = point.reach
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
    bottom = HEIGHT - BOTTOM
    lines = [
        element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value))
        for value in y.ticks
    ]
    ticks = [
        draw_text(label, LEFT - 7, y(value) + 4, "tick", "end")
        for value, label in zip(y.ticks, label_ticks(y), strict=True)
    ]
    name = draw_text(y.axis.label, 0, 12, "label", "start")
    axis = element("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom)
    return join(lines, ticks, name, draw_x_axis(x, TOP, bottom), axis)


def draw_x_axis(x: Scale, top: float, bottom: float) -> Markup:
    """The lower axis, with lines up from its ticks; names that would overlap are left out."""
    drawn, taken = [], -math.inf
    for value, label in zip(x.ticks, label_ticks(x), strict=True):
        half = len(label) * LETTER / 2
        middle = min(x(value), WIDTH - half)
        drawn.append(element("line", class_="grid", x1=x(value), x2=x(value), y1=top, y2=bottom))
        if middle - half >= taken:
            drawn.append(draw_text(label, middle, bottom + 16, "tick", "middle"))
            taken = middle + half + LETTER
    middle = (x.begin + x.end) / 2
    return join(drawn, draw_text(x.axis.label, middle, bottom + 36, "label", "middle"))


def draw_text(content: str, x: float, y: float, class_: str, anchor: str) -> Markup:
    """Words at a place."""
    return element("text", content, class_=class_, x=x, y=y, text_anchor=anchor)
