import re
from typing import Any

import pytest

from sce.experiments.figure_spec import FigureSpec
from sce.experiments.store import Row
from sce.report.charts import make_figures
from sce.report.drawing import Figure
from sce.report.frame import group_seeds
from tests.experiments.made_rows import CPU, make_row


def draw(rows: list[Row], view: FigureSpec) -> Figure:
    (figure,) = make_figures(group_seeds(rows), view)
    return figure


def row(key: str, loss: str = "sce", alpha: float | None = None, **changes: Any) -> Row:
    settings = {"loss.name": loss} | ({} if alpha is None else {"loss.alpha": alpha})
    return make_row(key, settings, **changes)


def test_points_off_the_pareto_front_are_faint_and_not_in_the_words() -> None:
    rows = [row(f"{n}", alpha=n, memory=100.0 * n, validation=score, test=score)
            for n, score in ((1, 0.05), (2, 0.04), (3, 0.07))]  # fmt: skip
    figure = draw(rows, FigureSpec("pareto", x="memory"))
    points = figure.chart.to_dict()["datasets"].values()
    (dots,) = [found for found in points if len(found) == 3]
    assert [(dot["x"], dot["opacity"]) for dot in dots] == [(100, 1.0), (200, 0.3), (300, 1.0)]
    assert figure.description == "test NDCG@10: SCE 0.05 to 0.07."
    assert [line[0] for line in figure.numbers] == ["SCE, alpha 1", "SCE, alpha 2", "SCE, alpha 3"]
    assert figure.heads[0] == "setting"


@pytest.mark.parametrize(
    ("cost", "where"), [("memory", CPU), ("time", {"at_once": 2}), ("time", {"at_once": None})]
)
def test_costs_that_are_not_ranked_have_no_front(cost: str, where: dict[str, Any]) -> None:
    scores = ((1, 0.05), (2, 0.04), (3, 0.07))
    ranked, other = (
        draw([row(f"{n}", alpha=n, memory=100.0 * n, seconds=9.0 * n, validation=score, **changes)
              for n, score in scores], FigureSpec("pareto", x=cost))
        for changes in ({}, where)
    )  # fmt: skip
    marks = [{one["mark"]["type"] for one in figure.chart.to_dict()["layer"]}
             for figure in (ranked, other)]  # fmt: skip
    assert ("line" in marks[0], "line" in marks[1]) == (True, False)
    assert ("Joined" in ranked.text, "Joined" in other.text) == (True, False)
    assert not other.text.startswith(" ")


def test_against_time_the_area_of_a_dot_is_its_share_of_the_largest_memory() -> None:
    rows = [row(f"{n}", alpha=n, memory=memory, seconds=10.0 * n)
            for n, memory in ((1, 800.0), (2, 400.0), (3, 1.0))]  # fmt: skip
    figure = draw(rows, FigureSpec("pareto", x="time"))
    points = figure.chart.to_dict()["datasets"].values()
    (dots,) = [found for found in points if len(found) == 3]
    assert [(dot["x"], dot["size"]) for dot in dots] == [(10, 200.0), (20, 100.0), (30, 12.0)]


def ticks(figure: Figure) -> list[str]:
    return re.findall(r"<text[^>]*>(\d[\d.]*[a-zµ]?)</text>", figure.svg)


@pytest.mark.parametrize("top", [0.5, 0.3, 0.05, 0.00025])
def test_all_ticks_of_an_axis_have_as_many_digits(top: float) -> None:
    rows = [row(f"{n}", alpha=n, test=top * n / 3) for n in (1, 2, 3)]
    found = ticks(draw(rows, FigureSpec("line", x="loss.alpha")))
    across, up = ([t for t in found if (float(t) < 1) == small] for small in (False, True))
    assert len(across) > 3 < len(up)
    for axis in (across, up):
        assert len({len(tick.partition(".")[2]) for tick in axis}) == 1, axis


def test_a_flat_curve_has_ticks_of_its_own_height() -> None:
    rows = [row(f"{n}", alpha=n, test=0.06) for n in (1, 2)]
    assert ticks(draw(rows, FigureSpec("line", x="loss.alpha")))[-1] == "0.06"


def test_ticks_below_one_on_a_logarithmic_axis_are_plain_numbers() -> None:
    for last, shown in ((2.0, ["0.3", "0.4", "0.5", "1", "2"]), (2e4, ["1", "100", "1k", "10k"])):
        rows = [row(f"{alpha}", alpha=alpha) for alpha in (0.25, 0.5, last)]
        found = ticks(draw(rows, FigureSpec("line", x="loss.alpha", log="x")))
        assert [tick for tick in found if tick in shown] == shown
        assert not {"0.6", "300m"} & {*found}


def test_a_loss_without_the_setting_is_a_level_across() -> None:
    rows = [row("a", alpha=1.0), row("b", alpha=2.0, test=0.08), row("c", "ce", test=0.03)]
    figure = draw(rows, FigureSpec("line", x="loss.alpha"))
    assert figure.description == "test NDCG@10: CE 0.03; SCE 0.06 to 0.08."
    assert len(figure.numbers) == 3
    assert figure.svg.count("<line") > draw(rows[:2], FigureSpec("line", x="loss.alpha")).svg.count(
        "<line"
    )


@pytest.mark.parametrize(
    ("rows", "view", "sentence"),
    [
        ([row("a", alpha=1.0), row("b", alpha=2.0)], FigureSpec("line", x="items", y="memory"),
         "Of settings at one place, the best by validation is drawn."),
        ([row("a")], FigureSpec("pareto", x="time"), "in proportion to its memory"),
    ],
)  # fmt: skip
def test_captions_say_what_a_reader_needs(rows: list[Row], view: FigureSpec, sentence: str) -> None:
    assert sentence in draw(rows, view).text


def test_epochs_are_drawn_as_far_as_all_seeds_went() -> None:
    rows = [row(f"{n}", seed=n, history={"loss": [3.0 - n, 2.0, 1.0][: 3 - n]}) for n in (0, 1)]
    figure = draw(rows, FigureSpec("epochs", y="loss"))
    assert figure.heads == ["epoch", "SCE"]
    assert figure.numbers == [["1", "2.50 ± 0.71"], ["2", "2"]]


def test_components_are_told_with_their_sum() -> None:
    rows = [row("a", "ce", components_mib={"weights": 10.0, "loss": 30.0})]
    figure = draw(rows, FigureSpec("components"))
    assert figure.description == "CE 40 MiB."
    assert figure.numbers == [["CE", "10 MiB", "0 MiB", "0 MiB", "0 MiB", "30 MiB", "0 MiB",
                               "40 MiB"]]  # fmt: skip
