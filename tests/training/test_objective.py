import math
from typing import Any

import numpy as np
import pytest
import torch

from sce.errors import InputError
from sce.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    GeneralizedBinaryCrossEntropy,
    InBatchNegatives,
    PopularityNegatives,
    SampledCrossEntropy,
    ScalableCrossEntropy,
    UniformNegatives,
)
from sce.training.objective import LossSettings, Workload, bucket_sizes, build_loss
from tests.cycle_data import lay_out

WORKLOAD = Workload(n_items=50, sequences=128, mean_length=200.0, counts=np.arange(1, 51))


@pytest.mark.parametrize(
    ("given", "kind", "attributes"),
    [
        ({"name": "bce"}, BinaryCrossEntropy, {"n_negatives": 1, "shared": "position"}),
        ({"name": "bce+"}, BinaryCrossEntropy, {"n_negatives": 256, "shared": "sequence"}),
        ({"name": "gbce", "t": 0.0}, GeneralizedBinaryCrossEntropy, {"t": 0.0}),
        ({"name": "gbce"}, GeneralizedBinaryCrossEntropy, {"t": 0.75, "n_negatives": 256}),
        ({"name": "ce-", "n_negatives": 9}, SampledCrossEntropy, {"n_negatives": 9}),
        ({"name": "ce-", "shared": "batch"}, SampledCrossEntropy, {"shared": "batch"}),
        ({"name": "ce"}, CrossEntropy, {"chunk_size": None}),
        ({"name": "ce", "chunk_size": 7}, CrossEntropy, {"chunk_size": 7}),
        ({}, ScalableCrossEntropy, {"bucket_size_y": 50, "mix": True, "n_buckets": 320}),
        ({}, ScalableCrossEntropy, {"mix_of": 4, "noise": 1.0}),
        ({"mix_of": 0}, ScalableCrossEntropy, {"mix": True, "mix_of": 0}),
        ({"noise": 0.5}, ScalableCrossEntropy, {"mix_of": 4, "noise": 0.5}),
        (
            {"mix": False, "bucket_size_y": 9},
            ScalableCrossEntropy,
            {"bucket_size_y": 9, "mix": False},
        ),
    ],
)
def test_names_give_losses(given: dict[str, Any], kind: type, attributes: dict[str, Any]) -> None:
    loss = build_loss(LossSettings(**given), WORKLOAD)
    assert type(loss) is kind
    for name, value in attributes.items():
        assert getattr(loss, name) == value


def test_samplers_and_their_correction() -> None:
    def sampler(**given: Any) -> Any:
        return build_loss(LossSettings(**given), WORKLOAD).negatives

    assert isinstance(sampler(name="bce+"), UniformNegatives)
    popular = sampler(name="ce-", negatives="popularity")
    assert isinstance(popular, PopularityNegatives)
    assert popular.correct
    assert not sampler(name="gbce", negatives="popularity").correct
    assert isinstance(sampler(name="ce-", negatives="in-batch"), InBatchNegatives)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (320, 320)),
        ({"alpha": 1.0}, (160, 160)),
        ({"beta": 4.0}, (160, 640)),
        ({"n_buckets": 5}, (5, 320)),
        ({"bucket_size_x": 5}, (320, 5)),
        ({"n_buckets": 7, "bucket_size_x": 5}, (7, 5)),
    ],
)
def test_bucket_sizes(given: dict[str, Any], expected: tuple[int, int]) -> None:
    sizes = bucket_sizes(LossSettings(**given), WORKLOAD)
    assert (sizes["n_buckets"], sizes["bucket_size_x"]) == expected


def test_sizes_that_nobody_has_are_refused() -> None:
    with pytest.raises(InputError, match=r"alpha 1e\+30 and beta 1.0 make .* buckets of"):
        bucket_sizes(LossSettings(alpha=1e30), WORKLOAD)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mix_of": -1}, "loss.mix_of is a number of states, or 0 for all of them; got -1"),
        ({"mix": False, "mix_of": 2}, "and loss.mix is off: leave out one of them"),
        ({"noise": -1.0}, "loss.noise lies between 0 and 1,000,000 .* got -1.0"),
        ({"noise": math.inf}, "loss.noise lies between 0 and 1,000,000 .* got inf"),
        ({"mix": False, "noise": 1.0}, "loss.mix is off: leave out one of them"),
        ({"mix_of": 0, "noise": 1.0}, "loss.mix_of is 0: leave out one of them"),
        ({"name": "ce", "t": 0.5}, "loss.t belongs to gbce, and the loss is ce"),
        (
            {"name": "sce", "n_negatives": 5},
            r"belongs to bce\+ and gbce and ce-, and the loss is sce",
        ),
        ({"name": "bce", "n_negatives": 5}, "n_negatives belongs to"),
        ({"name": "ce", "mix": False}, "loss.mix belongs to sce"),
        ({"name": "sce", "chunk_size": 5}, "chunk_size belongs to ce"),
        ({"name": "xent"}, "there is no loss 'xent'; choose from bce, "),
        ({"n_buckets": 2, "bucket_size_x": 2, "alpha": 1.0}, "both given"),
        ({"bucket_size_y": 0}, "loss.bucket_size_y must be at least 1; got 0"),
        ({"n_buckets": -1}, "loss.n_buckets must be at least 1"),
        ({"alpha": 0.0}, "loss.alpha must be above 0"),
        ({"beta": float("nan")}, "loss.beta must be above 0"),
        ({"name": "gbce", "t": 1.5}, "loss.t lies between 0 and 1; got 1.5"),
        ({"name": "ce-", "shared": "user"}, "loss.shared is one of position, sequence, batch"),
        ({"name": "ce-", "negatives": "hard"}, "loss.negatives is one of uniform"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LossSettings(**given)


def test_a_workload_is_measured_after_cutting_and_skipping() -> None:
    train = lay_out([[1, 2, 3, 4, 5, 6], [7], [1, 2, 1]], [0, 1, 2])
    workload = Workload.measure(train, 9, batch_size=10, max_length=4)
    assert (workload.sequences, workload.mean_length) == (2, 3.0)  # 4 and 2 targets
    assert workload.targets == 6.0
    assert workload.counts.tolist() == [0, 3, 2, 1, 1, 1, 1, 1, 0]


def test_nothing_to_train_on() -> None:
    with pytest.raises(InputError, match="no sequence has two events"):
        Workload.measure(lay_out([[1], [2]], [0, 1]), 9, batch_size=10, max_length=4)


def test_building_moves_no_random_numbers() -> None:
    before = torch.get_rng_state()
    build_loss(LossSettings(), WORKLOAD)
    assert torch.equal(before, torch.get_rng_state())


def test_what_has_no_meaning_is_not_filled_in() -> None:
    without, of_all = LossSettings(mix=False), LossSettings(mix_of=0)
    assert (without.mix_of, without.noise, of_all.noise) == (None, None, None)


@pytest.mark.parametrize(
    ("n_items", "n_events", "size", "mix"),
    [
        (3_411, 724_964, 85, True),
        (11_282, 630_253, 282, True),
        (12_101, 153_776, 303, False),
        (102_873, 476_237, 2_572, False),
        (10, 250, 10, True),
        (1_000, 24_999, 64, False),
        (10**8, 10**10, 4_096, True),
    ],
)
def test_the_dataset_settles_what_was_left_open(
    n_items: int, n_events: int, size: int, mix: bool
) -> None:
    found = LossSettings().settled(n_items, n_events)
    assert (found.bucket_size_y, found.mix) == (size, mix)
    assert (found.mix_of, found.noise) == ((4, 1.0) if mix else (None, None))
    assert found.settled(7, 10**6) == found  # nothing is open any more


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"bucket_size_y": 9}, (9, False, None, None)),
        ({"mix": True}, (64, True, 4, 1.0)),
        ({"mix_of": 2}, (64, True, 2, 1.0)),
        ({"mix_of": 0}, (64, True, 0, None)),
        ({"noise": 0.0}, (64, True, 4, 0.0)),
    ],
)
def test_what_is_given_stays(given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = LossSettings(**given).settled(1_000, 5_000)
    assert (found.bucket_size_y, found.mix, found.mix_of, found.noise) == expected


def test_with_sparse_gradients_buckets_stay_small() -> None:
    found = [LossSettings().settled(n, n, sparse_grad=True).bucket_size_y for n in (10**3, 10**6)]
    assert found == [64, 256]
    given = LossSettings(bucket_size_y=999).settled(10**6, 1, sparse_grad=True)
    assert given.bucket_size_y == 999


def test_other_losses_have_nothing_to_settle() -> None:
    assert LossSettings(name="ce-").settled(10**6, 10) == LossSettings(name="ce-")
