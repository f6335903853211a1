import json
import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from sce.report.figures import (
    HEIGHT,
    WIDTH,
    Bars,
    Caption,
    Level,
    Mark,
    Series,
    bar_chart,
    line_chart,
    scatter_chart,
)
from sce.report.scales import Axis
from sce.units import show_count, show_digits

CAPTION = Caption("Loss <over> time", "text", "It falls from 3 to 1.")
X, Y = Axis("epoch", show_count, whole=True), Axis("loss", show_digits)


def parse(figure: str) -> ET.Element:
    root = ET.fromstring(figure)  # not well-formed: an error
    svg = root.find("svg")
    assert svg is not None
    return svg


def all_of(svg: ET.Element, name: str, class_: str) -> list[ET.Element]:
    return [e for e in svg.iter(name) if class_ in e.get("class", "").split()]


def spots_of(svg: ET.Element) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(svg.get("data-spots", ""))
    return found


def assert_inside(svg: ET.Element) -> None:
    for name, places in [("circle", ("cx", "cy")), ("text", ("x", "y")), ("rect", ("x", "y"))]:
        for found in svg.iter(name):
            x, y = (float(found.get(place, "nan")) for place in places)
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT


def test_a_line_goes_through_its_points() -> None:
    series = [Series("a", [1, 2, 3], [3.0, 2.0, 1.0]), Series("b", [1, 2, 3], [1.0, 1.0, 3.0])]
    svg = parse(line_chart(series, caption=CAPTION, x_axis=X, y_axis=Y))
    first, second = svg.findall("path")
    points = [tuple(map(float, p.split(","))) for p in first.get("d", "")[1:].split("L")]
    dots = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in all_of(svg, "circle", "c1")]
    assert points == [pytest.approx(dot, abs=0.06) for dot in dots]
    across, up = zip(*points, strict=True)
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.1)
    assert up[0] < up[1] < up[2]  # a larger value is higher on the page
    assert second.get("class") == "line c2"
    assert_inside(svg)


def test_a_figure_says_in_words_what_it_shows() -> None:
    svg = parse(line_chart([Series("a", [1], [1.0])], caption=CAPTION, x_axis=X, y_axis=Y))
    desc = svg.find("desc")
    assert svg.get("role") == "img"
    assert svg.get("aria-label") == CAPTION.title
    assert desc is not None
    assert desc.text == CAPTION.description
    assert svg.get("aria-describedby") == desc.get("id")
    words = [text.text for text in svg.iter("text")]
    assert "epoch" in words


def test_gaps_break_a_line_and_lonely_points_are_dots() -> None:
    y = [1.0, 2.0, None, 3.0, math.nan, 2.0, 1.0] + [1.0] * 100
    svg = parse(line_chart([Series("a", range(len(y)), y)], caption=CAPTION, x_axis=X, y_axis=Y))
    [path] = svg.findall("path")
    assert path.get("d", "").count("M") == 3
    assert len(all_of(svg, "circle", "dot")) == 1  # of more than a hundred points
    assert len(spots_of(svg)) == len(y) - 2


def test_a_line_may_bridge_its_gaps() -> None:
    series = [Series("a", [1, 2, 3, 4], [None, 2.0, None, 3.0], bridged=True)]
    svg = parse(line_chart(series, caption=CAPTION, x_axis=X, y_axis=Y))
    [path] = svg.findall("path")
    assert path.get("d", "").count("M") == 1
    assert path.get("d", "").count("L") == 1
    ticks = [text.text for text in all_of(svg, "text", "tick")]
    assert "1" in ticks  # the axis has a place for what was not measured
    assert len(spots_of(svg)) == 2


def test_what_the_pointer_finds() -> None:
    series = [Series("train <b>", [1, 2], [3.0, 2.5]), Series("test", [2], [1.25])]
    svg = parse(line_chart(series, caption=CAPTION, x_axis=X, y_axis=Y))
    first, second = spots_of(svg)
    assert first["label"] == "epoch 1"
    assert first["rows"] == [["train <b>", "3"]]
    assert second["rows"] == [["train <b>", "2.5"], ["test", "1.25"]]
    assert len(second["dots"]) == 2  # type: ignore[arg-type]


def test_marks_and_levels() -> None:
    svg = parse(
        line_chart(
            [Series("a", [1, 2, 3], [1.0, 2.0, 3.0])],
            caption=CAPTION,
            x_axis=X,
            y_axis=Axis("y", from_zero=True),
            marks=[Mark(3, 3.0, "best: 3 at epoch 3"), Mark(1, 1.0, "a long name at the left")],
            levels=[Level(5.0, "popularity")],
        )
    )
    [level] = all_of(svg, "line", "level")
    mark = all_of(svg, "circle", "mark")[0]
    assert float(level.get("y1", "")) < float(mark.get("cy", ""))  # the axis reaches up to it
    labels = {text.text: text.get("text-anchor") for text in all_of(svg, "text", "strong")}
    assert labels == {"best: 3 at epoch 3": "end", "a long name at the left": "start"}
    assert_inside(svg)


def test_bars_are_as_high_as_their_values() -> None:
    groups = [Bars("model", [1.0, 2.0, None]), Bars("popularity", [0.5, math.inf, 0.0])]
    svg = parse(bar_chart(["1", "5", "10"], groups, caption=CAPTION, x_label="k", y_axis=Y))
    bars = all_of(svg, "rect", "bar")
    heights = [float(bar.get("height", "")) for bar in bars]
    assert heights[1] == pytest.approx(heights[0] / 2, rel=0.01)
    assert heights[2] == pytest.approx(heights[0] * 2, rel=0.01)
    assert len(bars) == 4
    feet = {round(float(b.get("y", "")) + float(b.get("height", "")), 1) for b in bars[:3]}
    assert len(feet) == 1
    assert spots_of(svg)[1]["rows"] == [["model", "2"], ["popularity", "–"]]
    assert_inside(svg)


def test_points_of_a_scatter_chart() -> None:
    series = [
        Series("sce", [450, 900], [0.14, 0.15], labels=["b_y 256", "b_y 512"]),
        Series("ce", [32_000, -1], [0.126, 0.5]),
    ]
    svg = parse(
        scatter_chart(
            series,
            caption=CAPTION,
            x_axis=Axis("MiB", log=True),
            y_axis=Axis("NDCG@10"),
            joined=True,
        )
    )
    assert len(all_of(svg, "circle", "dot")) == 3  # no place for -1 on a logarithmic axis
    assert [spot["label"] for spot in spots_of(svg)] == ["b_y 256", "b_y 512", "ce"]
    assert all(spot["y"] is not None for spot in spots_of(svg))
    assert_inside(svg)


def test_labels_that_would_touch_are_left_out() -> None:
    axis = Axis("memory", lambda value: f"{value:,.0f} mebibytes", log=True)
    series = [Series("a", [200, 50_000], [1.0, 2.0])]
    svg = parse(scatter_chart(series, caption=CAPTION, x_axis=axis, y_axis=Y))
    words = [text for text in svg.iter("text") if (text.text or "").endswith("mebibytes")]
    assert len(words) >= 2
    ends = [(float(w.get("x", "")), len(w.text or "") * 6 / 2) for w in words]
    for (before, half), (after, other) in pairwise(ends):
        assert before + half < after - other
    assert ends[-1][0] + ends[-1][1] <= WIDTH


def test_a_legend_where_there_is_more_than_one() -> None:
    one = line_chart([Series("a", [1], [1.0])], caption=CAPTION, x_axis=X, y_axis=Y)
    two = bar_chart(
        ["x"], [Bars("a<", [1.0]), Bars("b", [2.0])], caption=CAPTION, x_label="", y_axis=Y
    )
    assert "legend" not in one
    assert [li.text or li[0].tail for li in ET.fromstring(two).iter("li")] == ["a<", "b"]
