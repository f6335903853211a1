import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.data import synthetic
from sce.data.synthetic import Block, Integers, SyntheticSettings, generate
from sce.errors import InputError

SMALL = SyntheticSettings(items=1000, users=1500, seed=3)


def whole(settings: SyntheticSettings) -> Block:
    return Block(*(np.concatenate(column) for column in zip(*generate(settings), strict=True)))


@pytest.fixture(scope="module")
def log() -> Block:
    return whole(SMALL)


def successors(wanted: SyntheticSettings, items: Integers) -> Integers:
    """The item that a walk most likely goes to from each item: the rule to be learnt."""
    ids = synthetic.item_ids(wanted, np.arange(wanted.items))
    return ids[synthetic._successors(wanted, np.argsort(ids)[items])]


@given(
    items=st.integers(200, 3000),
    users=st.integers(1, 40),
    min_events=st.integers(1, 5),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=25, deadline=None)
def test_every_log_is_in_order_and_in_range(
    items: int, users: int, min_events: int, seed: int
) -> None:
    wanted = SyntheticSettings(items, users, seed, mean_events=8, min_events=min_events)
    log = whole(wanted)
    assert len(log.users) == len(log.items) == len(log.timestamps)
    assert {column.dtype for column in log} == {np.dtype(np.int64)}
    assert 0 <= log.items.min() <= log.items.max() < wanted.items
    found, lengths = np.unique(log.users, return_counts=True)
    assert found.tolist() == list(range(users))
    assert lengths.min() >= min_events
    assert (np.diff(log.users) >= 0).all()
    assert (np.diff(log.timestamps)[np.diff(log.users) == 0] > 0).all()


def test_parts_of_a_log_are_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "BLOCK_USERS", 400)
    blocks = [block.items.tolist() for block in generate(SMALL)]
    assert len(blocks) == 4
    for part in range(3):
        assert [block.items.tolist() for block in generate(SMALL, part, 3)] == blocks[part::3]


def test_lengths_are_as_asked(log: Block) -> None:
    lengths = np.bincount(log.users)
    assert lengths.min() == 20
    assert lengths.mean() == pytest.approx(40, rel=0.05)
    assert lengths.std() > 10


def test_equal_settings_give_equal_logs_and_other_seeds_others(log: Block) -> None:
    before = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    again = whole(SMALL)
    other = whole(SyntheticSettings(items=1000, users=1500, seed=4))
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]  # noqa: NPY002
    assert all(np.array_equal(one, same) for one, same in zip(log, again, strict=True))
    assert not np.array_equal(log.items[:100], other.items[:100])


def test_more_users_leave_whole_blocks_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "BLOCK_USERS", 50)
    few = list(generate(SyntheticSettings(items=500, users=120)))
    many = list(generate(SyntheticSettings(items=500, users=170)))
    assert [len(np.unique(block.users)) for block in few] == [50, 50, 20]
    for one, same in zip(few[:2], many, strict=False):
        assert all(map(np.array_equal, one, same))
    assert not np.array_equal(few[0].items[:100], few[1].items[:100])


def test_no_user_meets_an_item_twice(log: Block) -> None:
    pairs = log.users * SMALL.items + log.items
    assert len(np.unique(pairs)) == len(pairs)


@pytest.mark.parametrize("items", [200, 257, 1000, 1024, 1025, 12_345])
def test_successors_and_ids_are_one_to_one(items: int) -> None:
    wanted, everything = SyntheticSettings(items), np.arange(items)
    for permuted in (successors(wanted, everything), synthetic.item_ids(wanted, everything)):
        assert np.array_equal(np.sort(permuted), everything)


def test_popularity_follows_a_power_law(log: Block) -> None:
    counts = np.bincount(log.items, minlength=SMALL.items)
    ranks = np.arange(10, 500)
    assert -1.1 < np.polyfit(np.log(ranks), np.log(np.sort(counts)[::-1][ranks]), 1)[0] < -0.7
    # An id says nothing about popularity.
    assert abs(np.corrcoef(np.arange(SMALL.items), counts)[0, 1]) < 0.1


def test_sequences_can_be_learnt_and_popularity_is_not_enough(log: Block) -> None:
    training = log.users < 1000
    pairs = np.flatnonzero(np.diff(log.users) == 0)
    before, after = log.items[pairs], log.items[pairs + 1]
    known = training[pairs]

    # Fit on some users, predict the next item of others: by the most frequent follower …
    followers = np.zeros((SMALL.items, SMALL.items), dtype=np.int32)
    np.add.at(followers, (before[known], after[known]), 1)
    markov = float(np.mean(followers.argmax(axis=1)[before[~known]] == after[~known]))
    # … by the ten most popular items, and by the true rule.
    popular = np.argsort(-np.bincount(log.items[training], minlength=SMALL.items))[:10]
    popularity = float(np.mean(np.isin(after[~known], popular)))
    oracle = float(np.mean(successors(SMALL, before[~known]) == after[~known]))

    assert oracle > 0.6
    assert markov > 0.9 * oracle
    assert popularity < 0.2 * markov  # although it has ten guesses for the other's one


def test_walks_go_on_after_an_interruption(log: Block) -> None:
    # The item before the last tells more than a bigram knows: attention has something to do.
    pairs = np.flatnonzero(log.users[2:] == log.users[:-2])
    before = successors(SMALL, log.items[pairs])
    after = log.items[pairs + 2]
    interrupted = before != log.items[pairs + 1]
    assert np.mean(before[interrupted] == after[interrupted]) > 0.15


def test_a_temporal_split_leaves_users_on_both_sides(log: Block) -> None:
    cut = np.quantile(log.timestamps, 0.95, method="nearest")
    after = np.bincount(log.users[log.timestamps >= cut], minlength=SMALL.users)
    assert 0.04 * SMALL.users < np.count_nonzero(after >= 3) < 0.1 * SMALL.users
    assert np.count_nonzero(after == 0) > 0.9 * SMALL.users
    spans = (
        log.timestamps[np.flatnonzero(np.diff(log.users, append=-1))]
        - (log.timestamps[np.flatnonzero(np.diff(log.users, prepend=-1))])
    )
    assert spans.mean() / 86_400 == pytest.approx(14, rel=0.1)


def test_ten_million_items_need_no_table() -> None:
    log = whole(SyntheticSettings(items=10_000_000, users=300))
    assert len(np.unique(log.items)) > 5000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"items": 100}, "two clusters of 100 items or more; got 100 items"),
        ({"users": 0}, "users=0"),
        ({"seed": -1}, "seed=-1"),
        ({"min_events": 0}, "min_events=0"),
        ({"min_events": 50}, "mean_events=40.0, min_events=50"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SyntheticSettings(**changes)  # type: ignore[arg-type]
