from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.planning import LOSSES, Job, LossName, loss_bytes, predict
from sce.planning.coefficients import H200
from sce.planning.formula import ROW_WISE, TERMS, features, fixed_bytes

GIB = 2**30
SAMPLED: tuple[LossName, ...] = ("bce+", "gbce", "ce-")
losses = st.sampled_from(LOSSES)
jobs = st.builds(
    Job,
    items=st.integers(1, 10_000_000),
    batch=st.integers(1, 2000),
    length=st.integers(1, 500),
    dim=st.sampled_from([8, 48, 64, 200, 512]),
    blocks=st.integers(1, 4),
    heads=st.sampled_from([1, 2, 4]),
    precision=st.sampled_from(["float32", "tf32", "bf16"]),
    n_negatives=st.integers(1, 4000),
    bucket_size_y=st.integers(1, 4000),
    chunk_size=st.integers(1, 10_000),
)


@settings(max_examples=200, deadline=None)
@given(jobs, losses, st.data())
def test_more_of_anything_never_takes_less(job: Job, loss: LossName, data: st.DataObject) -> None:
    names = ["items", "batch", "length", "blocks", "bucket_size_y", "chunk_size"]
    if loss not in SAMPLED:  # with more negatives, those of fewer sequences may be there at once
        names.append("n_negatives")
    name = data.draw(st.sampled_from(names))
    more = replace(job, **{name: getattr(job, name) + data.draw(st.integers(1, 1000))})
    for larger in (more, replace(job, dim=512)):
        assert predict(larger, loss).total >= predict(job, loss).total


@settings(max_examples=50, deadline=None)
@given(jobs, losses)
def test_the_parts_make_up_the_peak_and_hold_what_is_always_there(job: Job, loss: LossName) -> None:
    found = predict(job, loss)
    assert min(found.model, found.activations, found.loss, found.other) >= 0
    assert found.total >= fixed_bytes(job, loss)
    # At some moment there are weights, both moments, and a gradient.
    dense = job.parameters - (job.items * job.dim if loss == ROW_WISE else 0)
    assert found.total >= 16 * dense
    assert predict(replace(job, precision="bf16"), loss).total <= predict(job, loss).total * 1.01


@settings(max_examples=50, deadline=None)
@given(jobs, losses)
def test_shorter_histories_and_known_data(job: Job, loss: LossName) -> None:
    shorter = replace(job, mean_length=job.length / 2)
    assert predict(shorter, loss).total <= predict(job, loss).total
    data = replace(job, events=10**6, users=10**5)
    added = predict(data, loss).total - predict(job, loss).total
    assert added == pytest.approx(4 * 10**6 + 8 * 100_001)


def test_the_logits_of_a_full_softmax_dominate() -> None:
    job = Job(1_000_000)
    logits = 128 * 200 * 1_000_000 * 4
    assert predict(job, "ce").loss == pytest.approx(3 * logits, rel=0.02)
    assert predict(job, "ce").moment == "loss backward"
    assert loss_bytes(job, "ce") == pytest.approx(3 * logits, rel=0.02)
    assert loss_bytes(job, "ce chunked") == pytest.approx(128 * 200 * 1024 * 4, rel=0.5)


def test_of_a_large_catalogue_the_gradient_is_there_twice() -> None:
    job = Job(10_000_000, batch=16)
    for loss in ("sce", "bce", "ce-"):
        found = predict(job, loss)
        assert found.moment == "embedding"
        assert found.model == pytest.approx(5 * 4 * job.parameters, rel=0.02)


def test_row_wise_updates_take_the_weights_and_little_more() -> None:
    job = Job(100_000_000)
    catalogue = 4 * job.items * (job.dim + 1)  # and an accumulator a row
    assert catalogue < predict(job, ROW_WISE).total < 1.05 * catalogue
    assert predict(job, "sce").total > 4 * catalogue
    # Of a small catalogue, the touched rows are what counts: several times, as they are moved.
    touched = Job(300_000, bucket_size_y=1024)
    assert predict(touched, ROW_WISE).moment == "update"
    rows = 4 * touched.dim * touched.bucket_sizes[0] * 1024
    assert 4 * rows < predict(touched, ROW_WISE).loss < 8 * rows


def test_large_buckets_are_worked_through_in_groups() -> None:
    usual, large, huge = (Job(1_000_000, bucket_size_y=size) for size in (256, 4096, 500_000))
    fused = [features(job, "sce") for job in (usual, large, huge)]
    assert [one["part"] for one in fused] == [320 * 256, 262_144, 500_000]
    assert [one["scores"] for one in fused] == [5_120_000, 20 << 20, 20 << 20]
    parts = predict(large, "sce").total - predict(usual, "sce").total
    assert 0 <= parts < 128 << 20
    # Rows of a sparse gradient: all places and positions, padding too, or each item once.
    short, few = replace(usual, mean_length=200.0 / 4), replace(usual, items=50_000)
    rows = [features(job, ROW_WISE)["row_dim"] / job.dim for job in (usual, short, large, few)]
    assert rows == [320 * 256 + 25_600, 160 * 256 + 25_600, 1_000_000, 50_000]


def test_what_losses_with_negatives_hold_beside_their_logits() -> None:
    # Negatives, logits and states of so many sequences as have 2 Mi numbers of each at most.
    gathered = replace(Job(10_000, batch=64, n_negatives=512), mean_length=2.0)
    at_once = 20 * (512 * 64 + 200 * 512 + 200 * 64)
    group = 64 * 512 * 64
    for loss in SAMPLED:
        found = features(gathered, loss)
        assert found["beside"] == at_once
        assert found["adding"] == group + max(at_once, 64 * 512 * (2 * 64 + 12))
    # Indices, and a flag for each, of some of the negatives.
    indices = Job(10_000, batch=32, length=100, dim=8, n_negatives=400)
    assert features(indices, "bce+")["beside"] == 2.25 * (1 << 20)
    # Copies of all logits.
    many = Job(10_000, batch=128, n_negatives=1024)
    logits = 128 * 200 * 1024
    assert [features(many, loss)["beside"] / logits for loss in SAMPLED] == [1, 1, 2]


def test_every_part_has_numbers_for_its_own_terms_and_no_others() -> None:
    assert set(H200.coefficients) == set(TERMS)
    known = features(Job(10), "sce")
    for part, numbers in H200.coefficients.items():
        assert set(numbers) <= set(TERMS[part]) <= set(known)
        assert all(number > 0 for number in numbers.values())
