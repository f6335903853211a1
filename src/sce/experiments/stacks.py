"""Stacked bars: what a whole is made of, one whole under the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sce.experiments.charts import BOTTOM, LETTER, RIGHT, WIDTH, Drawn, draw_text, draw_x_axis
from sce.report.figures import Caption
from sce.report.markup import Markup, element, join
from sce.report.scales import Axis, lay_out
from sce.units import show_share

_TOP, _BAR, _GAP = 12.0, 22.0, 12.0
_NAMES = 58.0  # room for the names of bars


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


def draw_stacks(chart: Stacks) -> Drawn:
    """Draw a bar for each stack, one under the other: the shares of its parts, and their sum."""
    height = _TOP + len(chart.stacks) * (_BAR + _GAP) + BOTTOM
    room = WIDTH - RIGHT - 9 * LETTER  # for the sums
    x = lay_out(Axis("share of the peak", show_share), [0.0, 1.0], begin=_NAMES, end=room)
    texts: list[Markup] = []
    groups: list[list[Markup]] = [[] for _ in chart.parts]
    told: list[dict[str, object]] = []
    for place, stack in enumerate(chart.stacks):
        total = sum(stack.parts)
        top = _TOP + place * (_BAR + _GAP)
        middle = top + _BAR / 2
        texts.append(draw_text(stack.name, _NAMES - 7, middle + 4, "strong", "end"))
        texts.append(draw_text(chart.show(total), x.end + 6, middle + 4, "value", "start"))
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
    inside = join(draw_x_axis(x, _TOP, height - BOTTOM), parts, texts)
    return Drawn(chart.caption, inside, height, names, told)
