from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.planning import LOSSES, Job, LossName, largest_batch, plan, predict
from sce.planning.formula import ROW_WISE
from sce.planning.search import CONTEXT, fits, usable

GIB = 2**30
MOST = 1 << 20


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 5_000_000),
    st.sampled_from([16, 64, 128]),
    st.integers(1, 300),
    st.sampled_from(LOSSES),
    st.integers(1, 64 * GIB),
)
def test_the_largest_batch_fits_and_one_more_does_not(
    items: int, dim: int, length: int, loss: LossName, memory: int
) -> None:
    job = Job(items, dim=dim, length=length)
    most = largest_batch(job, loss, memory)
    assert 0 <= most <= MOST
    if most:
        assert predict(replace(job, batch=most), loss).total <= usable(memory)
    if most < MOST:
        assert not fits(replace(job, batch=most + 1), loss, memory)


def test_a_plan_of_every_loss() -> None:
    found = plan(Job(1_000_000), 16 * 10**9)
    assert [one.loss for one in found.losses] == list(LOSSES)
    by_loss = {one.loss: one for one in found.losses}
    assert not by_loss["ce"].fits
    assert by_loss["sce"].fits
    assert by_loss["sce"].settings == {
        "n_buckets": 320,
        "bucket_size_x": 320,
        "bucket_size_y": 4096,
    }
    assert by_loss["sce row-wise"].settings["bucket_size_y"] == 256
    assert by_loss["ce chunked"].settings == {"chunk_size": 1024}
    assert by_loss["gbce"].settings == {"n_negatives": 256}
    assert found.largest_dim is None
    assert found.most_items is None
    assert found.largest_bucket is not None
    assert fits(Job(1_000_000, bucket_size_y=found.largest_bucket), "sce", 16 * 10**9)
    assert found.largest_bucket <= 1_000_000


def test_a_bucket_may_hold_the_whole_catalogue() -> None:
    assert plan(Job(496), 16 * 10**9).largest_bucket == 496


def test_a_batch_is_no_larger_than_the_data() -> None:
    assert largest_batch(Job(100, users=77, events=500), "sce", 16 * 10**9) == 77
    assert largest_batch(Job(100), "sce", 160 * 10**9) > 77


def test_what_would_fit_where_the_weights_do_not() -> None:
    job = Job(100_000_000, dim=128, heads=2)
    memory = 16 * GIB
    found = plan(job, memory)
    assert all(one.largest_batch == 0 and not one.fits for one in found.losses)
    assert found.largest_dim is not None
    assert fits(replace(job, batch=1, dim=found.largest_dim, heads=1), "sce", memory)
    assert not fits(replace(job, batch=1, dim=found.largest_dim + 1, heads=1), "sce", memory)
    assert found.most_items is not None
    assert fits(replace(job, batch=1, items=found.most_items), "sce", memory)
    assert not fits(replace(job, batch=1, items=found.most_items + 1), "sce", memory)


def test_what_fits_by_little_is_said_so() -> None:
    job = Job(100_000)
    peak = predict(job, "sce").total
    for share, fit, tight in ((0.99, False, False), (1.05, True, True), (1.2, True, False)):
        (one,) = plan(job, int(CONTEXT + share * peak), ["sce"]).losses
        assert (one.fits, one.tight) == (fit, tight)


def test_nothing_is_said_to_fit_into_nothing() -> None:
    found = plan(Job(10), None)
    assert all(one.fits is one.tight is one.largest_batch is None for one in found.losses)
    assert plan(Job(10), 1).losses[0].largest_batch == 0


@pytest.mark.parametrize("bucket_size_y", [256, 2500])
@pytest.mark.parametrize("mebibytes", [780, 800, 850, 1000, 1100])
def test_the_largest_batch_where_more_takes_less(bucket_size_y: int, mebibytes: int) -> None:
    """Row-wise updates: once buckets are worked through in groups, fewer rows are touched."""
    job = Job(100_000, bucket_size_y=bucket_size_y, users=400)
    memory = mebibytes << 20
    fitting = [b for b in range(1, 401) if fits(replace(job, batch=b), ROW_WISE, memory)]
    assert largest_batch(job, ROW_WISE, memory) == max(fitting, default=0)
