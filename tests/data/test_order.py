from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from sce.data.interactions import Interactions
from sce.data.order import describe_order, order_warning, shuffle_ties
from sce.data.synthetic import SyntheticSettings, generate
from sce.data.vocabulary import Vocabulary

ITEMS, USERS, EVENTS = 200, 1500, 20


@pytest.fixture(scope="module")
def log() -> Interactions:
    """A log that is worth learning from; the events of a user come in pairs of one time."""
    settings = SyntheticSettings(ITEMS, USERS, mean_events=EVENTS, min_events=EVENTS)
    (block,) = generate(settings)
    ids = Vocabulary.from_integers(np.arange(USERS))
    users, items = block.users.astype(np.int32), block.items.astype(np.int32)
    times = np.tile(np.arange(EVENTS) // 2, USERS)
    return shuffled(Interactions(users, items, times, ids, ids))


def shuffled(log: Interactions, seed: int = 0) -> Interactions:
    parts = [log]
    shuffle_ties(parts, seed)
    return parts[0]


def ties_by(log: Interactions, rank: NDArray[np.int64]) -> Interactions:
    order = np.lexsort((rank[log.items], log.timestamps, log.users))
    return replace(log, items=log.items[order])


def warning(log: Interactions, ties: str = "keep") -> str | None:
    return order_warning(describe_order([log]), ties=ties)


def test_a_log_in_true_order_is_no_matter(log: Interactions) -> None:
    found = describe_order([log])
    assert warning(log) is None
    assert found["tied"] == pytest.approx(10 / 19, abs=1e-4)
    assert found["one_time_users"] == 0
    assert found["ascending_ties"] == pytest.approx(0.5, abs=0.02)
    assert found["recurrence_ties"] == pytest.approx(1, abs=0.05)
    assert (found["recurrence"] or 0) > 2
    distinct = replace(log, timestamps=np.tile(np.arange(EVENTS), USERS))
    assert (describe_order([distinct])["tied"], warning(distinct)) == (0, None)


def test_ties_in_the_order_of_the_ids(log: Interactions) -> None:
    stored = ties_by(log, np.arange(ITEMS))
    assert describe_order([stored])["ascending_ties"] == 1
    assert "stored order is not random (100% of these go to the larger" in (warning(stored) or "")
    assert "0% of these go to the larger item id" in (
        warning(ties_by(log, -np.arange(ITEMS))) or ""
    )
    assert warning(stored, ties="shuffle") is None


def test_ties_in_an_order_of_items_that_no_id_shows(log: Interactions) -> None:
    # Small groups of items, each in an order of its own: ids ascend as often as they descend.
    stored = ties_by(log, np.random.default_rng(0).permutation(ITEMS))
    found = describe_order([stored])
    assert found["ascending_ties"] == pytest.approx(0.5, abs=0.1)
    assert (found["recurrence_ties"] or 0) > 1.1
    assert "times as often as with these shuffled" in (warning(stored) or "")


def test_logs_without_any_order(log: Interactions) -> None:
    at_once = replace(log, timestamps=np.zeros(len(log), np.int64))
    assert "the events of 100% of the users share one time" in (warning(at_once) or "")
    at_random = replace(shuffled(at_once, 1), timestamps=np.tile(np.arange(EVENTS), USERS))
    assert "the order of this log says nothing" in (warning(at_random) or "")
    by_item = replace(ties_by(at_once, np.arange(ITEMS)), timestamps=at_random.timestamps)
    assert "100% of all steps go to the larger item id" in (warning(by_item) or "")
    assert warning(at_once, ties="shuffle") is not None


def test_small_logs_are_not_judged(log: Interactions) -> None:
    few = ties_by(log, np.arange(ITEMS)).where(log.users < 5)
    found = describe_order([few])
    assert (found["ascending_ties"], found["recurrence"], warning(few)) == (None, None, None)
    assert set(describe_order([log.where(np.arange(len(log)) == 0)]).values()) == {None}


def test_shuffling_ties_changes_nothing_else(log: Interactions) -> None:
    one, same, other = (shuffled(log, seed) for seed in (5, 5, 6))
    assert np.array_equal(one.items, same.items)
    assert not np.array_equal(one.items, other.items)
    assert one.users is log.users
    pairs = one.items.reshape(-1, 2)
    assert np.array_equal(np.sort(pairs), np.sort(log.items.reshape(-1, 2)))
    assert 0.4 < np.mean(pairs != log.items.reshape(-1, 2)) < 0.6
