import time

import numpy as np
from numpy.typing import NDArray

from sce.report.pairs import RESAMPLES, relative_interval


def ranks(users: int, share: float, seed: int) -> NDArray[np.int32]:
    random = np.random.default_rng(seed)
    found = random.integers(1, 51, users)
    return np.where(random.random(users) < share, found, 0).astype(np.int32)


def test_it_is_that_of_users_drawn_one_by_one() -> None:
    ours, theirs = [ranks(300, 0.9, s) for s in (1, 2)], [ranks(300, 0.6, s) for s in (3, 4)]
    table = np.zeros(51)
    table[1:11] = 1 / np.log2(np.arange(2, 12))
    gains = [np.mean([table[one] for one in side], axis=0) for side in (ours, theirs)]
    random = np.random.default_rng(0)
    draws = random.integers(0, 300, (20 * RESAMPLES, 300))
    changes = gains[0][draws].mean(1) / gains[1][draws].mean(1) - 1
    expected = np.percentile(changes, [2.5, 97.5])
    found = relative_interval(ours, theirs)
    assert isinstance(found, tuple)
    assert np.allclose(found, expected, atol=0.1 * (expected[1] - expected[0]))
    assert relative_interval(ours, theirs) == found


def test_pairs_of_the_same_users_are_sharper_than_two_samples() -> None:
    ours = ranks(4000, 0.5, 1)
    theirs = np.where(ours == 1, 2, ours).astype(np.int32)
    found = relative_interval([ours], [theirs])
    assert isinstance(found, tuple)
    assert 0 < found[0] < found[1] < 0.15


def test_nothing_to_compare_with() -> None:
    none = np.zeros(900, np.int32)
    assert relative_interval([ranks(900, 1.0, 0)], [none]) == (
        "0 of them have a hit with the other, too few"
    )


def test_an_interval_rests_on_twenty_users_that_differ() -> None:
    theirs = np.full(900, 2, np.int32)
    for count, known in ((19, False), (20, True)):
        ours = np.where(np.arange(900) < count, 1, theirs).astype(np.int32)
        found = relative_interval([ours], [theirs])
        assert (found != "NDCG@10 differs for 19 of them, fewer than 20") is known


def test_a_million_users_take_seconds() -> None:
    before = time.perf_counter()
    found = relative_interval([ranks(10**6, 0.5, 1)], [ranks(10**6, 0.4, 2)])
    assert isinstance(found, tuple)
    assert time.perf_counter() - before < 10
