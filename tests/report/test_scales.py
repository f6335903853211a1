import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.report.scales import Axis, lay_out

FLOATS = st.floats(-1e9, 1e9).map(lambda value: round(value, 6))


@settings(max_examples=50, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=20), st.booleans(), st.booleans())
def test_every_value_has_a_place_and_ticks_are_even(
    values: list[float], from_zero: bool, whole: bool
) -> None:
    axis = Axis("x", from_zero=from_zero, whole=whole)
    scale = lay_out(axis, values, begin=200, end=20)
    for value in values:
        assert 20 - 1e-6 <= scale(value) <= 200 + 1e-6
    steps = [after - before for before, after in zip(scale.ticks, scale.ticks[1:], strict=False)]
    assert all(step == pytest.approx(steps[0]) for step in steps)
    assert len(scale.ticks) <= 9
    assert scale.low <= min(scale.ticks)
    assert scale.high >= max(scale.ticks)
    if from_zero:
        assert scale.low <= 0 <= scale.high
    if whole:
        assert all(tick == int(tick) for tick in scale.ticks)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=20))
def test_equal_factors_are_equal_steps(values: list[float]) -> None:
    scale = lay_out(Axis("x", log=True), values, begin=0, end=100)
    for value in values:
        assert -1e-6 <= scale(value) <= 100 + 1e-6
    assert len(scale.ticks) >= 2
    low, high = scale.low, scale.high
    assert scale(math.sqrt(low * high)) == pytest.approx(50)


def test_round_ticks() -> None:
    assert lay_out(Axis("x"), [4.2, 12.6], begin=0, end=1).ticks == (4, 6, 8, 10, 12, 14)
    zero = lay_out(Axis("x", from_zero=True), [0.03, 0.14], begin=0, end=1)
    assert zero.ticks == pytest.approx((0, 0.05, 0.1, 0.15))
    epochs = lay_out(Axis("epoch", whole=True), [1, 2, 3], begin=0, end=1)
    assert epochs.ticks == (1, 2, 3)


def test_one_value_and_none() -> None:
    for axis in (Axis("x"), Axis("x", whole=True), Axis("x", from_zero=True), Axis("x", log=True)):
        scale = lay_out(axis, [3.0], begin=0, end=100)
        assert 0 <= scale(3.0) <= 100
        assert lay_out(axis, [], begin=0, end=100).ticks
    epoch = lay_out(Axis("epoch", whole=True), [1], begin=0, end=100)
    assert (epoch.ticks, epoch(1)) == ((1,), 50)  # in the middle, not at the edge


def test_what_has_no_place() -> None:
    scale = lay_out(Axis("x", log=True), [None, math.nan, 0.0, -1.0, 5.0], begin=0, end=1)
    assert [scale.holds(value) for value in (None, math.nan, 0.0, -1.0, 5.0)] == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert lay_out(Axis("x"), [0.0], begin=0, end=1).holds(0.0)


def test_an_axis_reaches_as_far_as_it_is_told() -> None:
    assert lay_out(Axis("x", from_zero=True, up_to=1.0), [0.3], begin=0, end=1).high == 1
