"""A drawn figure on the page, and as a file of its own."""

import json
from collections.abc import Sequence

from sce.experiments.charts import DASHES, LETTER, WIDTH, Drawn, draw_text
from sce.report.markup import Markup, element


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
    head: list[Markup] = [draw_text(drawn.caption.title, 12, 22, "title", "start")]
    left, top = 12.0, 42.0
    for name, colour, dash in drawn.names if len(drawn.names) > 1 else ():
        wide = 32 + (len(name) + 2) * LETTER
        if left + wide > WIDTH:
            left, top = 12.0, top + 18
        sample = element(
            "line", class_="line", x1=left, x2=left + 22, y1=top - 4, y2=top - 4,
            stroke_dasharray=DASHES[dash] or None,
        )  # fmt: skip
        head.append(element("g", sample, class_=f"curve k{colour}"))
        head.append(draw_text(name, left + 27, top, "label", "start"))
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
