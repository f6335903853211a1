import math

import pytest

from sce.experiments.axes import dot_radius, label_ticks, name_measure, value_axis
from sce.report.scales import Axis, lay_out
from sce.units import show_digits, show_share


def ticks(low: float, high: float, axis: Axis | None = None) -> list[str]:
    return label_ticks(lay_out(axis or Axis("y"), [low, high], begin=0, end=100))


def test_ticks_have_the_digits_that_tell_them_apart() -> None:
    assert ticks(416, 418) == ["416.0", "416.5", "417.0", "417.5", "418.0"]
    assert ticks(410, 420) == ["410", "412", "414", "416", "418", "420"]
    assert ticks(410, 422) == ["410.0", "412.5", "415.0", "417.5", "420.0", "422.5"]
    assert ticks(10_010, 10_030)[:2] == ["10.010k", "10.015k"]
    share = Axis("share", show_share)
    assert ticks(0.5010, 0.5030, share)[:2] == ["50.10%", "50.15%"]
    assert ticks(0.05, 0.08, Axis("y", show_digits)) == ["0.05", "0.06", "0.07", "0.08"]


@pytest.mark.parametrize("high", [1.001, 1.03, 2.0, 9.7, 730.0, 12_345.0, 3e7])
def test_ticks_never_repeat(high: float) -> None:
    for low in (0.0, 1.0, high * 0.999, high * 0.9):
        found = ticks(low, high)
        assert len(set(found)) == len(found)


def test_the_area_of_a_dot_is_in_proportion() -> None:
    assert dot_radius(416.0, 418.0) / dot_radius(418.0, 418.0) == pytest.approx(
        math.sqrt(416 / 418)
    )
    assert dot_radius(100.0, 400.0) == dot_radius(400.0, 400.0) / 2
    assert dot_radius(0.001, 400.0) == 2.0  # small, and still seen
    assert dot_radius(None, 400.0) > 0


def test_measures_have_names_and_units() -> None:
    assert name_measure("speed") == "training speed"
    assert value_axis("speed", log=False).label == "training speed, tokens per second"
    assert value_axis("memory", log=False).label == "peak training memory, MiB"
    assert name_measure("test.ndcg@10") == "test NDCG@10"
