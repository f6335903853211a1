from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.data.length_groups import group_by_length, shares_longer
from sce.errors import InputError
from sce.losses import LOSSES
from sce.models.hstu import HSTUSettings
from sce.models.sasrec import SASRecSettings
from sce.planning import (
    CONTEXT,
    MAX_SEQUENCES,
    PLANNED,
    ROW_WISE,
    Job,
    fits,
    largest_batch,
    plan,
    predict,
    summarize_lengths,
    usable,
)

GIB = 2**30
names = st.sampled_from(list(PLANNED))
steady = names.filter(lambda name: name != "rece")  # fewer targets: fewer and larger chunks


def make(items: int, *, batch: int = 128, length: int = 200, dim: int = 64, **given: Any) -> Job:
    model = {name: given.pop(name) for name in ("blocks", "heads") if name in given}
    others = {name: given.pop(name) for name in Job.__dataclass_fields__ if name in given}
    return Job(items, batch, SASRecSettings(dim=dim, max_length=length, **model), options=given,
               **others)  # fmt: skip


sizes = st.fixed_dictionaries(
    {
        "items": st.integers(1, 10_000_000),
        "batch": st.integers(1, 2000),
        "length": st.integers(1, 500),
        "dim": st.sampled_from([8, 48, 64, 200, 512]),
        "blocks": st.integers(1, 4),
        "heads": st.sampled_from([1, 2, 4]),
        "precision": st.sampled_from(["float32", "tf32", "bf16"]),
        "n_negatives": st.integers(1, 4000),
        "bucket_size_y": st.integers(1, 4000),
        "chunk_size": st.integers(1, 10_000),
    }
)


@settings(max_examples=60, deadline=None)
@given(sizes, steady, st.data())
def test_more_of_anything_never_takes_less(
    given_sizes: dict[str, Any], name: str, data: st.DataObject
) -> None:
    grown = data.draw(st.sampled_from(["items", "batch", "blocks", "bucket_size_y", "chunk_size"]))
    given_sizes |= {"n_buckets": 300}  # by default there are fewer where there are more items
    more = given_sizes | {grown: given_sizes[grown] + data.draw(st.integers(1, 990))}
    before = predict(make(**given_sizes), name).total
    for larger in (more, given_sizes | {"dim": 512}):
        assert predict(make(**larger), name).total >= before * (1 - 1e-12)


@settings(max_examples=50, deadline=None)
@given(sizes, names)
def test_the_parts_make_up_the_peak(given_sizes: dict[str, Any], name: str) -> None:
    job = make(**given_sizes)
    found = predict(job, name)
    assert min(found.model, found.activations, found.loss, found.other) >= 0
    # At some moment there are weights, both moments, and a gradient.
    dense = sum(p.numel() for p in job.build_model().parameters())
    dense -= job.items * job.backbone.dim if name == ROW_WISE else 0
    assert found.total >= 16 * dense
    assert predict(replace(job, precision="bf16"), name).total <= found.total * 1.01
    shorter = replace(job, mean_length=job.length / 2)
    assert name == "rece" or predict(shorter, name).total <= found.total
    added = predict(replace(job, events=10**6, users=10**5), name).total - found.total
    assert added == pytest.approx(4 * 10**6 + 8 * 100_001)


def test_the_logits_of_a_full_softmax_dominate() -> None:
    job, logits = Job(1_000_000), 128 * 200 * 1_000_000 * 4
    assert predict(job, "ce").loss == pytest.approx(3 * logits, rel=0.02)
    assert predict(job, "ce").moment == "loss backward"
    chunked = job.build_loss("ce chunked").memory(job.shape)
    assert chunked is not None
    assert chunked.forward == pytest.approx(128 * 200 * (1024 + 64) * 4)


def test_of_a_large_catalogue_the_gradient_is_there_twice() -> None:
    for name in ("sce", "bce", "ce-"):
        found = predict(Job(10_000_000, batch=16), name)
        assert found.moment == "embedding"
        assert found.model == pytest.approx(5 * 4 * 10_000_000 * 64, rel=0.02)


def test_row_wise_updates_take_the_weights_and_little_more() -> None:
    job = Job(100_000_000)
    catalogue = 4 * job.items * 65  # and an accumulator a row
    assert catalogue < predict(job, ROW_WISE).total < 1.05 * catalogue
    assert predict(job, "sce").total > 4 * catalogue
    # Of a small catalogue, the touched rows are what counts: several times, as they are moved.
    touched = make(300_000, bucket_size_y=1024)
    found = predict(touched, ROW_WISE)
    rows = 4 * 64 * (300_000 + 128 * 200)  # every item is in a bucket, and the input's rows
    assert found.moment == "update"
    assert 5 * rows < found.model - 4 * 300_000 * 65 < 6 * rows


def test_buckets_by_default_and_rows_of_a_sparse_gradient() -> None:
    for job, rows in (
        (Job(10**6), 320 * 256 + 25_600),
        (Job(10**6, options={"alpha": 1.0}), 160 * 256 + 25_600),
        (Job(50_000), 50_000),
    ):
        memory = job.build_loss(ROW_WISE).memory(job.shape)
        assert memory is not None
        assert memory.gradient_rows == rows


def test_parts_follow_from_the_lengths_or_from_what_their_mean_allows() -> None:
    job = make(10, batch=64, length=8)
    assert job.length_groups == ((64, 8),)
    assert replace(job, longer=(0.5, 0.5, 1.0), users=64).length_groups == ((32, 8), (32, 2))
    assert (
        replace(job, mean_length=1.0).length_groups
        == replace(job, longer=(0.25, 0.5, 1.0)).length_groups
    )
    lengths = torch.tensor(40 * [3] + 24 * [8])  # as training cuts a batch of these
    shares = tuple(shares_longer(lengths, 8))
    assert replace(job, longer=shares, users=64).length_groups == group_by_length(lengths, 8)


def test_the_fullest_batch_is_above_the_mean_by_the_root_of_its_size_and_never_overfull() -> None:
    def shape(batch: int, spread: float) -> tuple[float, float]:
        found = make(10, batch=batch, length=8, mean_length=4.0, length_spread=spread).shape
        return found.targets, found.max_targets

    # The sum of n lengths deviates by their spread times the root of n.
    assert shape(100, 2.0) == (400.0, 400.0 + 3.5 * 2.0 * 10)
    assert shape(4, 2.0) == (16.0, 16.0 + 3.5 * 2.0 * 2)
    assert shape(4, 9.0) == (16.0, 4 * 8)


def test_what_is_trained_on_of_the_sequences() -> None:
    # One event predicts nothing; of nine the last four targets are, of three both.
    found = {"mean_length": 3, "length_spread": 1, "longer": (0.5, 1.0)}
    assert summarize_lengths(np.array([1, 3, 1, 9]), 4) == (4, found)
    assert summarize_lengths(np.array([1, 3, 1, 3]), 4)[0] == 2
    with pytest.raises(InputError, match="no sequence has two events"):
        summarize_lengths(np.array([1, 1]), 4)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"items": 0}, "items must be at least 1; got 0"),
        (
            {"items": 10**18},
            "items must be fewer than 2,147,483,648; got 1,000",
        ),
        ({"items": 9, "batch": -3}, "batch must be at least 1; got -3"),
        ({"items": 9, "heads": 3}, "64 is not a multiple of 3 heads"),
        ({"items": 9, "length": 10, "mean_length": 11.0}, "no more than length, 10; got 11"),
        ({"items": 9, "mean_length": 0.0}, "mean_length lies above 0"),
        ({"items": 9, "chunk_size": 0}, "chunk_size must be at least 1"),
        ({"items": 9, "alpha": float("nan")}, "alpha must be finite"),
        ({"items": 9, "alpha": 1e9}, "alpha 1000000000.0 and beta 1.0 make .* buckets"),
    ],
)
def test_what_is_no_job(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        plan(make(**given), None)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5_000_000),
    st.sampled_from([16, 64, 128]),
    st.integers(1, 300),
    names,
    st.integers(1, 64 * GIB),
)
def test_the_largest_batch_fits_and_one_more_does_not(
    items: int, dim: int, length: int, name: str, memory: int
) -> None:
    job = make(items, dim=dim, length=length)
    most = largest_batch(job, name, memory)
    assert 0 <= most <= MAX_SEQUENCES
    if most:
        assert predict(replace(job, batch=most), name).total <= usable(memory)
    if most < MAX_SEQUENCES:
        assert not fits(replace(job, batch=most + 1), name, memory)


def test_a_plan_of_every_loss() -> None:
    found = plan(Job(1_000_000), 16 * 10**9)
    by_name = {one.name: one for one in found.losses}
    assert list(by_name) == list(PLANNED)
    assert set(LOSSES) <= set(by_name)
    assert not by_name["ce"].fits
    assert by_name["sce"].fits
    sce = {"n_buckets": 320, "bucket_size_y": 2048}
    assert by_name["sce"].sizes == sce
    assert by_name[ROW_WISE].sizes == sce | {"bucket_size_y": 256}
    assert by_name["ce chunked"].sizes == {"chunk_size": 1024}
    assert by_name["gbce"].sizes == {"n_negatives": 256}
    assert by_name["ce"].sizes == by_name["bce"].sizes == {}
    assert found.largest_dim is None
    assert plan(Job(496), 16 * 10**9).largest_bucket == 496


def test_a_batch_is_no_larger_than_the_data() -> None:
    assert largest_batch(Job(100, users=77, events=500), "sce", 16 * 10**9) == 77
    assert largest_batch(Job(100), "sce", 160 * 10**9) > 77


def test_what_would_fit_where_the_weights_do_not() -> None:
    memory = 16 * GIB
    found = plan(make(100_000_000, dim=128, heads=2), memory)
    assert all(one.largest_batch == 0 and not one.fits for one in found.losses)
    assert found.largest_dim is not None
    for dim, fit in ((found.largest_dim, True), (found.largest_dim + 1, False)):
        assert fits(make(100_000_000, batch=1, dim=dim, heads=1), "sce", memory) == fit


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


def test_times_of_events_take_as_much_as_the_events() -> None:
    jobs = [
        Job(1000, 4, HSTUSettings(dim=8, max_length=10, times=times), events=10**9, users=10**6)
        for times in ("none", "next")
    ]
    without, with_times = (predict(job, "sce").other for job in jobs)
    assert with_times - without == 4 * 10**9 + 4 * 4 * 10
