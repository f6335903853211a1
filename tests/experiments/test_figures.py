import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

import pytest

from sce.experiments.charts import Chart, Curve, Drawn, Point, draw_chart
from sce.experiments.figures import make_figures
from sce.experiments.frames import as_figure, as_file
from sce.experiments.rows import Row
from sce.experiments.summary import group_settings
from sce.experiments.views import View
from sce.report.figures import Caption
from sce.report.scales import Axis
from tests.experiments.made_rows import CPU, GPU, main_rows, make_row

PARTS = {"weights": 10.0, "optimizer": 20.0, "activations": 30.0, "gradients": 5.0, "loss": 400.0}


def draw(rows: Sequence[Row], view: View) -> list[Drawn]:
    return list(make_figures(group_settings(rows), view))


def names(drawn: Drawn) -> list[str]:
    return [name for name, _, _ in drawn.names]


def labels(drawn: Drawn) -> list[str]:
    return [str(point["label"]) for point in drawn.points]


def test_a_pareto_figure_for_each_dataset() -> None:
    found = draw(list(main_rows(1)), View("pareto", x="memory"))
    assert [one.caption.title.partition(":")[0] for one in found] == ["ml1m", "beauty", "globo"]
    assert names(found[0]) == ["BCE", "BCE⁺", "gBCE", "CE⁻", "CE", "SCE"]
    assert len(found[0].points) == 2 + 6 + 6 + 6 + 2 + 6
    assert "SCE, batch_size 64, bucket_size_y 1,024" in labels(found[0])
    text = str(dict(found[0].points[0])["rows"])
    assert "test NDCG@10" in text
    assert "peak memory" in text


def test_what_is_not_on_the_front_is_faint() -> None:
    rows = [
        make_row(str(n), {"loss.name": "sce", "loss.alpha": n}, memory=m, validation=v, test=t)
        for n, (m, v, t) in enumerate([(100, 0.1, 0.3), (200, 0.05, 0.9), (300, 0.2, 0.2)])
    ]
    (found,) = draw(rows, View("pareto"))
    dots = re.findall(r'<circle class="([^"]+)"', found.inside)
    assert dots == ["dot", "dot faint", "dot"]  # by memory; the second is best on test events


def test_a_loss_without_the_setting_is_a_band() -> None:
    rows = [make_row(f"s{n}", {"loss.name": "sce", "loss.bucket_size_y": 4**n}) for n in (2, 3)]
    rows += [make_row(f"c{s}", {"loss.name": "ce"}, seed=s, test=0.05 + s / 100) for s in (0, 1)]
    (found,) = draw(rows, View("line", x="loss.bucket_size_y", log="x"))
    assert "CE: 0.0550" in labels(found)
    assert found.inside.count('class="area"') == 1
    assert [point["x"] for point in found.points if "SCE" in str(point["label"])] != []


def test_memory_against_the_catalogue_is_one_figure_of_all_datasets() -> None:
    rows = [
        make_row(f"{items}{loss}", {"loss.name": loss}, data=f"d{items}", items=items, memory=items)
        for items in (1000, 100_000) for loss in ("ce", "sce")
    ]  # fmt: skip
    (found,) = draw(rows, View("line", x="items", y="memory", log="xy"))
    assert names(found) == ["CE", "SCE"]
    assert "CE, 100,000 items" in labels(found)


def test_the_course_of_training_ends_where_the_first_seed_did() -> None:
    rows = [
        make_row(f"{mix}{seed}", {"loss.name": "sce", "loss.mix": mix}, seed=seed)
        for mix in (False, True) for seed in (0, 1)
    ]  # fmt: skip
    del rows[0]["history"]["picked_once"][5:]
    (found,) = draw(rows, View("epochs", y="picked_once", by=("loss.mix",)))
    assert names(found) == ["without mix", "with mix"]
    assert [point["label"] for point in found.points].count("without mix") == 5
    assert [point["label"] for point in found.points].count("with mix") == 24


def test_components_add_up() -> None:
    rows = [make_row("a", {"loss.name": "ce"}, components_mib={**PARTS, "peak": 465.0}),
            make_row("b", {"loss.name": "sce"})]  # fmt: skip
    (found,) = draw(rows, View("components"))
    assert "465 MiB" in found.inside
    widths = [float(w) for w in re.findall(r'class="bar"[^>]* width="([\d.]+)"', found.inside)]
    assert widths[4] / sum(widths) == pytest.approx(400 / 465, rel=0.01)


def test_a_spread_does_not_reach_below_nothing() -> None:
    rows = [make_row(f"{seed}", {"loss.name": "ce", "training.batch_size": size}, seed=seed,
                     test=test, memory=float(size))
            for size in (1, 2) for seed, test in enumerate((0.001, 0.1))]  # fmt: skip
    for view in (View("pareto"), View("line", x="training.batch_size")):
        (found,) = draw(rows, view)
        ticks = re.findall(r'class="tick"[^>]*text-anchor="end"[^>]*>([^<]+)<', found.inside)
        assert ticks[0] == "0"
        assert "−" not in "".join(ticks)
        assert "-" not in "".join(ticks)


def test_that_only_the_best_is_drawn_is_said() -> None:
    rows = [make_row(f"{a}{b}", {"loss.name": "sce", "loss.alpha": a, "loss.beta": b})
            for a in (1.0, 2.0) for b in (1.0, 4.0)]  # fmt: skip
    (found,) = draw(rows, View("line", x="loss.alpha", text="Mine."))
    assert found.caption.text == "Mine. Of settings at one place, the best by validation is drawn."
    (found,) = draw(rows, View("line", x="loss.alpha", by=("loss.beta",)))
    assert found.caption.text == ""


def test_without_validation_it_is_not_said_to_choose() -> None:
    rows = [make_row(f"{items}{batch}", {"loss.name": "ce", "training.batch_size": batch},
                     data=f"d{items}", items=items, memory=float(items + batch), validation=None,
                     test=None, measure="steps", steps=9)
            for items in (100, 200) for batch in (10, 30, 20)]  # fmt: skip
    (found,) = draw(rows, View("line", x="items", y="memory"))
    assert found.caption.text == "Of settings at one place, the one that reaches highest is drawn."
    assert found.caption.description == "peak training memory: CE 130 to 230."


def test_both_axes_have_a_name_and_a_unit() -> None:
    rows = [make_row(f"{a}", {"loss.name": "sce", "loss.alpha": a}, memory=416.0 + a,
                     tokens_per_second=1e5) for a in (0.2, 0.9, 2.1)]  # fmt: skip
    views = {
        View("line", x="loss.alpha", y="memory"): ["peak training memory, MiB", "alpha"],
        View("line", x="loss.alpha", y="speed"): ["training speed, tokens per second", "alpha"],
        View("pareto", x="time"): ["test NDCG@10", "training time, seconds"],
        View("epochs", y="picked_once"): ["states picked once", "epoch"],
    }
    for view, expected in views.items():
        (found,) = draw(rows, view)
        assert re.findall(r'class="label"[^>]*>([^<]+)<', found.inside) == expected
        assert "  " not in found.caption.title
        ticks = re.findall(r'class="tick"[^>]*text-anchor="end"[^>]*>([^<]+)<', found.inside)
        assert len(set(ticks)) == len(ticks)


def test_dots_are_as_large_as_memory_is() -> None:
    rows = [make_row(f"{m}", {"loss.name": "sce", "loss.alpha": m}, memory=m, seconds=m)
            for m in (100.0, 400.0)]  # fmt: skip
    (found,) = draw(rows, View("pareto", x="time"))
    small, large = (float(r) for r in re.findall(r'<circle[^>]* r="([\d.]+)"', found.inside))
    assert large == pytest.approx(2 * small)
    assert "The area of a dot is in proportion to its memory." in found.caption.text


@pytest.mark.parametrize("view", [View("pareto"), View("pareto", x="time"),
                                  View("line", x="loss.alpha", y="memory")])  # fmt: skip
def test_points_are_of_one_device(view: View) -> None:
    rows = [
        make_row(f"{alpha}{seed}", {"loss.name": "sce", "loss.alpha": alpha}, seed=seed,
                 memory=memory, seconds=memory, **where)
        for alpha in (1.0, 2.0)
        for seed, (memory, where) in enumerate([(416.0, CPU), (50.0 * alpha, GPU)])
    ]  # fmt: skip
    for alpha, memory, where in ((4.0, 200.0, GPU), (3.0, 300.0, CPU)):
        rows.append(make_row(f"{alpha}", {"loss.name": "sce", "loss.alpha": alpha}, memory=memory,
                             seconds=memory, **where))  # fmt: skip
    (found,) = draw(rows, view)
    boxes: list[Any] = [point["rows"] for point in found.points]
    assert [dict(rows)["peak memory"] for rows in boxes] == ["50 MiB", "100 MiB", "200 MiB"]
    assert "those of 3 runs on cpu, 2 threads" in found.caption.text
    assert "1 setting with no other run cannot be drawn." in found.caption.text
    assert "whole process" not in found.caption.text


def test_components_are_of_one_device() -> None:
    rows = [make_row(f"{n}", {"loss.name": "ce"}, seed=n, components_mib={"loss": size}, **where)
            for n, (size, where) in enumerate([(10.0, GPU), (90.0, CPU)])]  # fmt: skip
    (found,) = draw(rows, View("components"))
    assert ">10 MiB<" in found.inside
    assert "are left out" in found.caption.text
    assert "there was no GPU" not in found.caption.text


def test_without_a_gpu_the_kinds_of_memory_are_told_apart() -> None:
    measured: dict[str, Any] = {
        "memory_measured": "resident memory of the process",
        "components_mib": PARTS,
    }
    rows = [make_row("a", {"loss.name": "ce"}, **measured)]
    (pareto,), (parts,) = (draw(rows, View(kind)) for kind in ("pareto", "components"))
    assert "Memory is that of the whole process" in pareto.caption.text
    assert "Bytes of live tensors, not of the process" in parts.caption.text


def test_pairs_have_a_colour_and_a_dash() -> None:
    rows = [
        make_row(f"{a}{b}", {"loss.name": "sce", "loss.alpha": a, "loss.beta": b})
        for a in (1.0, 2.0) for b in (1.0, 4.0, 16.0)
    ]  # fmt: skip
    (found,) = draw(rows, View("pareto", by=("loss.alpha", "loss.beta")))
    assert [(colour, dash) for _, colour, dash in found.names] == [
        (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("view", [View("pareto"), View("line", x="loss.alpha"),
                                  View("epochs", y="placed"), View("components")])  # fmt: skip
def test_nothing_to_show_is_no_figure(view: View) -> None:
    assert draw([], view) == []
    bare = make_row("a", {"loss.name": "ce"}, test=None, history={})
    assert draw([bare], view) == []


def test_a_figure_as_a_file_is_whole_svg() -> None:
    (found, *_) = draw(list(main_rows(1)), View("pareto"))
    root = ET.fromstring(as_file(found, ".x { color: red }"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"BCE⁺", "SCE", found.caption.title} <= set(texts)


def test_names_are_escaped() -> None:
    curve = Curve("<b>", [Point(1, 1, '"><script>', (("<i>", "</svg>"),))], 1)
    drawn = draw_chart(Chart(Caption("<h1>"), Axis("x"), Axis("y"), [curve]))
    for text in (as_figure(drawn, "key"), as_file(drawn, "")):
        assert "<b>" not in text
        assert "<script>" not in text
        assert "<h1>" not in text
