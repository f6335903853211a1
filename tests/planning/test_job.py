from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.data.parts import parts_of, shares_longer
from sce.errors import InputError
from sce.models.sasrec import SASRec, SASRecSettings
from sce.planning import Job
from sce.planning.job import sizes_of


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 50), st.integers(1, 9), st.integers(1, 5), st.integers(1, 3))
def test_the_parameters_are_those_of_the_model(
    items: int, length: int, width: int, blocks: int
) -> None:
    job = Job(items, length=length, dim=2 * width, blocks=blocks, heads=2)
    model = SASRec(items, SASRecSettings(dim=2 * width, max_length=length, blocks=blocks, heads=2))
    assert job.parameters == sum(p.numel() for p in model.parameters())


def test_positions_and_targets() -> None:
    assert (Job(10, batch=4, length=5).positions, Job(10, batch=4, length=5).targets) == (20, 20)
    assert Job(10, batch=4, length=5, mean_length=2.5).targets == 10
    assert Job(10, batch=128, length=200).bucket_sizes == (320, 320)
    assert Job(10, batch=128, length=200, n_buckets=7).bucket_sizes == (7, 320)
    assert Job(10, batch=128, length=200, bucket_size_x=9).bucket_sizes == (320, 9)


def test_what_is_trained_on_of_the_sequences() -> None:
    # One event predicts nothing; of nine the last four targets are, of three both.
    found = sizes_of(np.array([1, 3, 1, 9]), 4)
    assert found == {"length": 4, "mean_length": 3, "length_spread": 1, "longer": (0.5, 1.0)}
    assert sizes_of(np.array([1, 3, 1, 3]), 4)["length"] == 2
    assert sizes_of(np.array([1, 1]), 4) == {"length": 1}


def test_parts_follow_from_the_lengths_or_from_what_their_mean_allows() -> None:
    job = Job(10, batch=64, length=8)
    assert job.parts == ((64, 8),)
    assert replace(job, longer=(0.0, 0.0, 0.0)).parts == ((64, 1),)
    assert replace(job, longer=(0.5, 0.5, 1.0), users=64).parts == ((32, 8), (32, 2))
    assert replace(job, mean_length=1.0).parts == replace(job, longer=(0.25, 0.5, 1.0)).parts
    # As training cuts a batch of these.
    lengths = torch.tensor(40 * [3] + 24 * [8])
    shares = tuple(shares_longer(lengths, 8))
    assert replace(job, longer=shares, users=64).parts == parts_of(lengths, 8)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"items": 0}, "items must be at least 1; got 0"),
        ({"items": 9, "batch": -3}, "batch must be at least 1; got -3"),
        ({"items": 9, "chunk_size": 0}, "chunk_size must be at least 1"),
        ({"items": 9, "n_buckets": 0}, "n_buckets must be at least 1; got 0"),
        ({"items": 9, "dim": 64, "heads": 3}, "64 is not a multiple of 3 heads"),
        ({"items": 9, "precision": "fp8"}, "precision is one of float32, tf32, bf16; got 'fp8'"),
        ({"items": 9, "length": 10, "mean_length": 11.0}, "no more than length, 10; got 11"),
        ({"items": 9, "mean_length": 0.0}, "mean_length lies above 0"),
        ({"items": 9, "longer": (0.5, 0.7)}, "longer has 3 shares from 0 to 1"),
        ({"items": 9, "longer": (0.5, 0.7, 0.6)}, "none smaller than the one before"),
        ({"items": 9, "longer": (0.5, 0.7, 1.1)}, "longer has 3 shares from 0 to 1"),
        ({"items": 9, "longer": (0.5, 0.7, float("nan"))}, "longer has 3 shares from 0 to 1"),
        ({"items": 9, "alpha": float("nan")}, "alpha must be above 0; got nan"),
        ({"items": 9, "alpha": 1e9}, "alpha 1000000000.0 and beta 1.0 make .* buckets"),
    ],
)
def test_what_is_no_job(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Job(**given)  # type: ignore[arg-type]
