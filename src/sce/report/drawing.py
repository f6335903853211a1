"""Altair charts as static SVG: one theme, and colours that a page can set for light and dark."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import polars as pl
import vl_convert

from sce.losses import LOSSES

PALETTE = ("#0b66c3", "#c4560a", "#0a7d5a", "#a0458a", "#7a6500", "#56616f", "#b3261e", "#3f6212",
           "#6d3fc0", "#0e7490")  # fmt: skip
WIDTH, HEIGHT = 390, 220  # of the plot, without axes
MANY = 60  # points of a curve that are not marked one by one any more
DASHES = ([1, 0], [7, 4], [2, 4], [9, 3, 2, 3])
PAPER, INK, SOFT, RULE = "#ffffff", "#1b1f24", "#5b6470", "#dfe3e8"
# In a page every colour of the theme becomes a variable of style.css.
_VARIABLES = {colour: f"c{n}" for n, colour in enumerate(PALETTE, 1)}
_VARIABLES |= {PAPER: "paper", INK: "ink", SOFT: "soft", RULE: "rule"}
_CONFIG = {
    "font": "sans-serif", "background": "transparent", "aria": False, "view": {"stroke": None},
    "axis": {"labelColor": SOFT, "titleColor": SOFT, "titleFontWeight": "normal",
             "labelFontSize": 11.5, "titleFontSize": 11.5, "gridColor": RULE, "domainColor": SOFT,
             "ticks": False, "labelPadding": 6, "titlePadding": 8, "labelOverlap": "greedy"},
    "axisX": {"grid": False},
    "axisY": {"domain": False, "titleAngle": 0, "titleAlign": "left", "titleAnchor": "end",
              "titleY": -14, "titleX": -38},
    "legend": {"orient": "top", "labelColor": INK, "labelFontSize": 12, "title": None,
               "columns": 3, "symbolStrokeWidth": 3, "labelLimit": 300, "offset": 28,
               "columnPadding": 18},
    "title": {"anchor": "start", "color": INK, "fontSize": 14, "fontWeight": 600, "offset": 12,
              "frame": "bounds"},
}  # fmt: skip
_NOISE = re.compile(
    r' (?:class|role|aria-hidden|aria-roledescription|pointer-events|opacity="1"|version'
    r'|xmlns:xlink|stroke-miterlimit|font-family)(?:="[^"]*")?(?=[ />])'
)
_EMPTY = re.compile(r'<path(?: aria-hidden="true")? d="[^"]*"(?: display="none")?(?: stroke="")?/>')
_PLACES = re.compile(r' (?:transform|d)="[^"]*"')
_TOLD = re.compile(r'<(path|rect)([^>]*) aria-label="([^"]*)"([^>]*)/>')


@dataclass(frozen=True)
class Axis:
    """One axis: its title, and how its numbers are written."""

    title: str
    format: str | None = None  # None, or "s" for k and M: all ticks have as many digits
    log: bool = False
    zero: bool = False
    whole: bool = False

    def encode(self, values: Sequence[float]) -> dict[str, Any]:
        """Options of an Altair channel for values along the axis."""
        axis: dict[str, Any] = {"tickCount": 5} | ({"format": self.format} if self.format else {})
        flat = min(values, default=0.0) == max(values, default=0.0)  # else its one tick says 0
        scale: dict[str, Any] = {"zero": self.zero or flat, "nice": not self.whole}
        if self.whole:  # epochs
            first, last = int(min(values)), int(max(values))
            step = -(-(last - first) // 6) or 1
            axis |= {"format": "d", "values": list(range(-(-first // step) * step, last + 1, step))}
            scale |= {"domain": [first, last] if last > first else [first - 0.5, first + 0.5]}
        if self.log:
            plain = "datum.label && datum.value < 1 ? format(datum.value, '~g') : datum.label"
            axis |= {"format": "~s", "labelExpr": plain}  # never 300m for 0.3
            scale = {"type": "log", "nice": False, "padding": 12}
        return {"title": self.title, "axis": alt.Axis(**axis), "scale": alt.Scale(**scale)}


EPOCHS = Axis("epoch", whole=True)


@dataclass(frozen=True)
class Figure:
    """A chart, what it says in words, and its numbers as a table."""

    title: str
    text: str  # a sentence under the title
    description: str  # the chart in words, for those who do not see it
    chart: alt.TopLevelMixin
    heads: Sequence[str] = ()
    numbers: Sequence[Sequence[str]] = ()  # rows under `heads`: what the chart shows, in numbers

    @property
    def svg(self) -> str:
        """Inline SVG for a page, in the page's own colours."""
        drawn = _render(self.chart)
        for colour, name in _VARIABLES.items():
            drawn = drawn.replace(f'"{colour}"', f'"var(--{name})"')
        label = html.escape(f"{self.title}. {self.description}")
        return drawn.replace("<svg", f'<svg class="chart" role="img" aria-label="{label}"', 1)

    @property
    def file(self) -> str:
        """An SVG file with its title, on white: readable on light and dark pages."""
        titled = self.chart.properties(title=self.title)
        drawn = _render(titled.properties(background=PAPER, padding=12))
        font = ' font-family="system-ui, -apple-system, Segoe UI, Liberation Sans, sans-serif"'
        return drawn.replace("<svg", f"<svg{font}", 1) + "\n"


def _render(chart: alt.TopLevelMixin) -> str:
    spec = chart.to_dict()
    spec["config"] = _CONFIG | {"background": spec.get("background", "transparent")}
    svg = vl_convert.vegalite_to_svg(spec)
    svg = _TOLD.sub(r"<\1\2\4><title>\3</title></\1>", svg)  # a browser shows it on hovering
    svg = _EMPTY.sub("", _NOISE.sub("", svg))
    return _PLACES.sub(lambda found: re.sub(r"(\.\d{2})\d+", r"\1", found[0]), svg)


@dataclass(frozen=True)
class Point:
    """A value of a curve, give or take a spread."""

    x: float
    y: float
    told: str = ""  # shown on hovering
    spread: float = 0.0
    faint: bool = False  # off the curve
    size: float = 38.0


@dataclass(frozen=True)
class Curve:
    """Points of one colour, or a level across the chart."""

    name: str
    points: Sequence[Point] = ()
    colour: str = PALETTE[0]
    dash: int = 0
    level: Point | None = None


def draw_curves(
    curves: Sequence[Curve],
    x: Axis,
    y: Axis,
    *,
    area: bool = False,
    front: bool | None = None,
    also: Sequence[alt.Chart] = (),
) -> alt.TopLevelMixin:
    """Draw curves with their spreads, and the layers of `also` over the same scales.

    With `area`, spreads are areas, and there are no dots. A `front` is continued to the right edge:
    nothing that costs more is better; False joins no points.
    """
    frame = pl.DataFrame(
        [_row(c, p, y) for c in curves for p in c.points
         if not ((x.log and p.x <= 0) or (y.log and p.y <= 0))], infer_schema_length=None
    )  # fmt: skip
    joined = frame.filter(opacity=1.0)
    encoded_x = alt.X("x:Q", **x.encode(frame["x"].to_list()))
    options = y.encode(frame["y"].to_list())
    encoded_y, low = alt.Y("y:Q", **options), alt.Y("low:Q", **options)
    style: dict[str, Any] = {"color": colours([(c.name, c.colour) for c in curves], "stroke")}
    dashes = alt.Scale(domain=[c.name for c in curves], range=[DASHES[c.dash] for c in curves])
    dashed = alt.StrokeDash(
        "name:N", scale=dashes, legend=None if len(curves) < 2 else alt.Legend()
    )
    base = alt.Chart(joined).encode(x=encoded_x, **style)
    layers = []
    levels = [_row(c, c.level, y) for c in curves if c.level is not None]
    if levels:
        across = alt.Chart(pl.DataFrame(levels)).encode(**style)
        layers.append(across.mark_rect(opacity=0.15).encode(y=low, y2="high:Q"))
        layers.append(across.mark_rule(strokeDash=[6, 4], strokeWidth=2).encode(y=encoded_y))
    wide = base.properties(data=joined.filter(pl.col("high") > pl.col("low")))
    spreads = base.mark_area(opacity=0.15) if area else wide.mark_rule(opacity=0.6)
    layers.append(spreads.encode(y=low, y2="high:Q"))
    if front is not False:
        layers.append(base.mark_line().encode(y=encoded_y, strokeDash=dashed))
    if front:
        last = joined.group_by("name", maintain_order=True).last()
        onward = base.properties(data=last).mark_rule(strokeDash=[2, 4], strokeWidth=2, opacity=0.6)
        layers.append(onward.encode(y=encoded_y, x2=alt.value("width")))
    if not area and len(frame) <= MANY * len(curves):
        dots = alt.Chart(frame).mark_point(filled=True, aria=True).encode(
            x=encoded_x, y=encoded_y, description="told:N", **style,
            opacity=alt.Opacity("opacity:Q", scale=None), size=alt.Size("size:Q", scale=None),
        )  # fmt: skip
        layers.append(dots)
    return alt.layer(*layers, *also).properties(width=WIDTH, height=HEIGHT)


def _row(curve: Curve, point: Point, axis: Axis) -> dict[str, Any]:
    """A point as data; the spread of a value above 0 does not reach below 0."""
    low = point.y - point.spread
    if low <= 0 < point.y:
        low = point.y if axis.log else 0.0
    return {
        "name": curve.name, "x": point.x, "y": point.y, "low": low, "high": point.y + point.spread,
        "told": point.told, "opacity": 0.3 if point.faint else 1.0, "size": point.size,
    }  # fmt: skip


def colours(named: Sequence[tuple[str, str]], symbol: str) -> alt.Color:
    """The colour channel of names, with a legend where there are several."""
    longest = max((len(name) for name, _ in named), default=0)
    columns = max(1, min(len(named), int(WIDTH // (45 + 6.5 * longest))))
    legend = alt.Legend(
        columns=columns, symbolType=symbol, symbolSize=220, symbolOpacity=1, title=None
    )
    scale = alt.Scale(domain=[name for name, _ in named], range=[colour for _, colour in named])
    return alt.Color("name:N", scale=scale, legend=legend if len(named) > 1 else None)


def loss_colour(name: str) -> str:
    """The colour of a loss: its place in the table of losses."""
    return PALETTE[(5 - list(LOSSES).index(name)) % len(PALETTE)]
