"""Line, bar and scatter charts as inline SVG: no library, no network, nothing of any one page.

Colours, fonts and what a pointer does belong to the page (page.css, page.js); here are places, text
and classes. Every figure says in words what it shows, for those who do not see it, and carries its
values for the box that follows the pointer or the arrow keys.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sce.report.markup import Child, Markup, element, join
from sce.report.scales import Axis, Scale, lay_out

WIDTH, HEIGHT = 460.0, 260.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 12.0, 26.0, 40.0  # room around the plot
_MANY = 60  # points of a line that are not marked one by one any more
_LETTER = 6.2  # about the width of one, for labels that must not leave the figure


@dataclass(frozen=True)
class Series:
    """A line, or a cloud of points."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]  # a gap where there is no number
    labels: Sequence[str] = ()  # of each point, for scatter charts
    bridged: bool = False  # draw the line across gaps: nothing was measured there


@dataclass(frozen=True)
class Mark:
    """A point worth noticing, and why."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Level:
    """A value to compare with: a line across the figure."""

    y: float
    label: str


@dataclass(frozen=True)
class Bars:
    """One bar per category, all of one colour."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class Caption:
    """What a figure is called, and what it says."""

    title: str
    text: str = ""
    """A sentence under the title."""
    description: str = ""
    """The figure in words, for those who do not see it."""


def line_chart(
    series: Sequence[Series],
    *,
    caption: Caption,
    x_axis: Axis,
    y_axis: Axis,
    marks: Sequence[Mark] = (),
    levels: Sequence[Level] = (),
) -> Markup:
    """Draw lines over a common x, each broken where it has no value."""
    x, y = _scales(series, x_axis, y_axis, [mark.y for mark in marks] + [at.y for at in levels])
    return _figure(
        caption,
        [one.name for one in series],
        [
            _grid(x, y),
            [_line(one, x, y, f"c{n}") for n, one in enumerate(series, 1)],
            [_mark(mark, x, y) for mark in marks],
            [_level(level, x, y) for level in levels],
        ],
        hover=_line_hover(series, x, y),
    )


def scatter_chart(
    series: Sequence[Series],
    *,
    caption: Caption,
    x_axis: Axis,
    y_axis: Axis,
    joined: bool = False,
) -> Markup:
    """Draw points, each series in its colour; joined by lines if their order means something."""
    x, y = _scales(series, x_axis, y_axis)
    drawn: list[Child] = [_grid(x, y)]
    hover = []
    for n, one in enumerate(series, 1):
        if joined:
            drawn.append(_line(one, x, y, f"c{n}", dots=False))
        labels = one.labels or [one.name] * len(one.x)
        for at, value, label in zip(one.x, one.y, labels, strict=True):
            if value is None or not (x.holds(at) and y.holds(value)):
                continue
            drawn.append(element("circle", class_=f"dot c{n}", cx=x(at), cy=y(value), r=4.5))
            rows = [(x.axis.label, x.axis.tell(at)), (y.axis.label, y.axis.tell(value))]
            hover.append(_Spot(x(at), label, [(n, y(value))], rows, y=y(value)))
    return _figure(caption, [one.name for one in series], drawn, hover=hover)


def bar_chart(
    categories: Sequence[str],
    groups: Sequence[Bars],
    *,
    caption: Caption,
    x_label: str,
    y_axis: Axis,
) -> Markup:
    """Draw upright bars from zero, side by side within each category, with their values on top.

    Args:
        categories: Their names, from left to right.
        groups: Bars of one colour each, one for every category.
        caption: What it is called.
        x_label: What the categories are.
        y_axis: What is measured; it begins at zero whatever it says.
    """
    values = [value for group in groups for value in group.values]
    axis = Axis(y_axis.label, y_axis.show, from_zero=True, up_to=y_axis.up_to)
    y = lay_out(axis, values, begin=HEIGHT - _BOTTOM, end=_TOP)
    step = (WIDTH - _LEFT - _RIGHT) / max(1, len(categories))
    wide = min(46.0, 0.8 * step / max(1, len(groups)))
    show = y_axis.tell
    drawn: list[Child] = [_y_grid(y)]
    hover = []
    for place, category in enumerate(categories):
        middle = _LEFT + step * (place + 0.5)
        drawn.append(_text(category, middle, HEIGHT - _BOTTOM + 16, "tick", anchor="middle"))
        rows = []
        for n, group in enumerate(groups, 1):
            value = group.values[place]
            if value is None or not y.holds(value):
                rows.append((group.name, "–"))
                continue
            left = middle + wide * (n - 1 - len(groups) / 2)
            top, foot = sorted((y(value), y(0)))
            drawn.append(
                element(
                    "rect",
                    class_=f"bar c{n}",
                    x=left + 1,
                    y=top,
                    width=wide - 2,
                    height=max(0.5, foot - top),
                    rx=2,
                )
            )
            if len(show(value)) * _LETTER * 0.9 <= max(wide, step / len(groups)):
                drawn.append(_text(show(value), left + wide / 2, top - 4, "value", anchor="middle"))
            rows.append((group.name, show(value)))
        hover.append(_Spot(middle, f"{x_label} {category}".strip(), [], rows))
    drawn.append(_x_label(x_label))
    return _figure(caption, [group.name for group in groups], drawn, hover=hover)


@dataclass(frozen=True)
class _Spot:
    """What the box shows when the pointer is near a place."""

    x: float
    label: str
    dots: list[tuple[int, float]]  # the number of a colour, and the height of a dot
    rows: list[tuple[str, str]]  # a name and a value each
    y: float | None = None  # where nearness counts in both directions


def _figure(
    caption: Caption, names: Sequence[str], drawn: Sequence[Child], hover: Sequence[_Spot]
) -> Markup:
    key = re.sub(r"[^a-z0-9]+", "-", caption.title.lower()).strip("-")
    spots = [
        {"x": round(s.x, 1), "y": s.y, "label": s.label, "dots": s.dots, "rows": s.rows}
        for s in hover
    ]
    return element(
        "figure",
        element(
            "figcaption",
            element("h3", caption.title),
            element("p", caption.text) if caption.text else None,
            _legend(names) if len(names) > 1 else None,
        ),
        element(
            "svg",
            element("desc", caption.description or caption.text, id=f"desc-{key}"),
            *drawn,
            class_="chart",
            viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
            role="img",
            aria_label=caption.title,
            aria_describedby=f"desc-{key}",
            tabindex="0" if spots else None,
            data_spots=json.dumps(spots, separators=(",", ":"), ensure_ascii=False),
            data_top=_TOP,
            data_bottom=HEIGHT - _BOTTOM,
        ),
        class_="figure",
    )


def _legend(names: Sequence[str]) -> Markup:
    return element(
        "ul",
        [
            element("li", element("span", class_=f"swatch c{n}"), name)
            for n, name in enumerate(names, 1)
        ],
        class_="legend",
    )


def _scales(
    series: Sequence[Series], x_axis: Axis, y_axis: Axis, also: Sequence[float] = ()
) -> tuple[Scale, Scale]:
    across = [value for one in series for value in one.x]
    upwards = [value for one in series for value in one.y] + list(also)
    return (
        lay_out(x_axis, across, begin=_LEFT, end=WIDTH - _RIGHT, ticks=6),
        lay_out(y_axis, upwards, begin=HEIGHT - _BOTTOM, end=_TOP),
    )


def _grid(x: Scale, y: Scale) -> Markup:
    return join(_y_grid(y), _x_ticks(x), _x_label(x.axis.label))


def _x_ticks(x: Scale) -> list[Markup]:
    """The values under the axis: inside the figure, and none that would touch the one before."""
    drawn, taken = [], 0.0
    for value in x.ticks:
        label = x.axis.show(value)
        half = len(label) * _LETTER / 2
        middle = min(x(value), WIDTH - half)
        if middle - half >= taken:
            drawn.append(_text(label, middle, HEIGHT - _BOTTOM + 16, "tick", "middle"))
            taken = middle + half + _LETTER
    return drawn


def _y_grid(y: Scale) -> Markup:
    lines = [
        element(
            "line",
            class_="axis" if value in (0, y.low) else "grid",
            x1=_LEFT,
            x2=WIDTH - _RIGHT,
            y1=y(value),
            y2=y(value),
        )
        for value in y.ticks
    ]
    ticks = [_text(y.axis.show(value), _LEFT - 7, y(value) + 4, "tick", "end") for value in y.ticks]
    return join(lines, ticks)


def _x_label(text: str) -> Markup:
    return _text(text, (_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 6, "label", "middle")


def _line(one: Series, x: Scale, y: Scale, colour: str, *, dots: bool = True) -> Markup:
    runs = list(_runs(one, x, y))
    path = "".join(
        "M" + "L".join(f"{across:.1f},{up:.1f}" for across, up in run) for run in runs if run
    )
    points = [point for run in runs for point in run]
    if len(points) > _MANY:  # only those that no line shows, between two gaps
        points = [run[0] for run in runs if len(run) == 1]
    shown = points if dots else []
    return join(
        element("path", class_=f"line {colour}", d=path),
        [element("circle", class_=f"dot {colour}", cx=a, cy=u, r=2.5) for a, u in shown],
    )


def _runs(one: Series, x: Scale, y: Scale) -> Iterator[list[tuple[float, float]]]:
    """Yield the stretches of a line between its gaps."""
    run: list[tuple[float, float]] = []
    for at, value in zip(one.x, one.y, strict=True):
        if value is not None and x.holds(at) and y.holds(value):
            run.append((x(at), y(value)))
        elif run and not one.bridged:
            yield run
            run = []
    if run:
        yield run


def _level(level: Level, x: Scale, y: Scale) -> Markup:
    at = y(level.y)
    return join(
        element("line", class_="level", x1=x.begin, x2=x.end, y1=at, y2=at),
        _text(level.label, x.end, at - 5, "note", "end"),
    )


def _mark(mark: Mark, x: Scale, y: Scale) -> Markup:
    across, up = x(mark.x), y(mark.y)
    half = len(mark.label) * _LETTER / 2
    anchor = "middle"
    if across - half < _LEFT:
        anchor = "start"
    elif across + half > WIDTH:
        anchor = "end"
    return join(
        element("line", class_="drop", x1=across, x2=across, y1=up, y2=HEIGHT - _BOTTOM),
        element("circle", class_="mark", cx=across, cy=up, r=5),
        _text(mark.label, across, up - 11, "strong", anchor),
    )


def _line_hover(series: Sequence[Series], x: Scale, y: Scale) -> list[_Spot]:
    """One spot for every x that any line has a value at."""
    spots: dict[float, _Spot] = {}
    for n, one in enumerate(series, 1):
        for at, value in zip(one.x, one.y, strict=True):
            if value is None or not (x.holds(at) and y.holds(value)):
                continue
            label = f"{x.axis.label} {x.axis.tell(at)}"
            spot = spots.setdefault(at, _Spot(x(at), label, [], []))
            spot.dots.append((n, round(y(value), 1)))
            spot.rows.append((one.name, y.axis.tell(value)))
    return [spots[at] for at in sorted(spots)]


def _text(content: str, x: float, y: float, class_: str, anchor: str = "start") -> Markup:
    return element("text", content, class_=class_, x=x, y=y, text_anchor=anchor)
