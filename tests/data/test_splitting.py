from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.data.interactions import Interactions, Tally, tally_parts
from sce.data.prepare import prepare
from sce.data.prepared import Sequences
from sce.data.reading import read_interactions
from sce.data.splitting import Split, show_time, split_leave_one_out, split_temporal
from sce.errors import InputError

Row = tuple[int, str, int]  # user, item, time
History = Literal["after-cut", "full"]


def log_of(rows: Sequence[Row]) -> Interactions:
    frame = pl.DataFrame(rows, ["user", "item", "time"], orient="row")
    return read_interactions(frame, time_unit="us")


def named(split: Split, sequences: Sequences) -> dict[int | str, str]:
    """Each user's items, one letter each."""
    return {
        split.user_ids[int(user)]: "".join(map(str, split.item_ids.decode(sequences[i])))
        for i, user in enumerate(sequences.users)
    }


def user(name: int, items: str, times: Sequence[int]) -> list[Row]:
    return [(name, item, time) for item, time in zip(items, times, strict=True)]


# Ten events before 100 and ten from it on: the median is 100.
WORKED = [
    *user(1, "abcd", [1, 2, 3, 4]),
    *user(2, "bcz", [5, 6, 7]),
    *user(3, "abcad", [8, 9, 100, 101, 102]),  # evaluated; two events before the cut
    *user(4, "axb", [103, 104, 105]),  # x is not in training: two known events are too few
    *user(5, "abc", [10, 106, 107]),  # two events from the cut on
    *user(6, "xy", [108, 109]),
]


def test_temporal_split_by_hand() -> None:
    split = split_temporal(log_of(WORKED), quantile=0.5)
    assert split.kind == "temporal"
    assert split.cut == 100
    assert named(split, split.train) == {1: "abcd", 2: "bcz"}
    assert named(split, split.test) == {3: "cad"}
    assert split.item_ids.decode(range(5)) == ["a", "b", "c", "d", "z"]
    assert split.user_ids.decode(range(3)) == [1, 2, 3]
    assert split.train_tally == Tally("training", 2, 5, 7)
    assert split.test_tally == Tally("test", 1, 3, 3)
    assert split.left_out == (
        Tally("events of test users before the cut: dropped", 2, 2, 3),
        Tally("test events on items not in training: dropped", 2, 2, 3),
        Tally("test users without 3 known events from the cut on: not evaluated", 3, 3, 4),
    )


def test_full_histories_still_have_both_targets_after_the_cut() -> None:
    split = split_temporal(log_of(WORKED), quantile=0.5, test_history="full")
    assert named(split, split.train) == {1: "abcd", 2: "bcz"}
    assert named(split, split.test) == {3: "abcad", 5: "abc"}
    late_target_only = [*WORKED, *user(7, "abc", [11, 12, 110])]
    split = split_temporal(log_of(late_target_only), quantile=0.55, test_history="full")
    assert split.cut == 100
    assert named(split, split.test) == {3: "abcad", 5: "abc"}
    assert split.left_out == (
        Tally("test events on items not in training: dropped", 2, 2, 3),
        Tally(
            "test users without 3 known events, two of them from the cut on: not evaluated",
            *(3, 3, 5),
        ),
    )


def test_leave_one_out_by_hand() -> None:
    split = split_leave_one_out(log_of(WORKED))
    assert split.kind == "leave-one-out"
    assert split.cut is None
    assert named(split, split.train) == {1: "ab", 2: "b", 3: "abc", 4: "a", 5: "a", 6: "xy"}
    assert named(split, split.test) == {1: "abcd", 2: "bcz", 3: "abcad", 4: "axb", 5: "abc"}
    assert split.train_tally == Tally("training", 6, 5, 10)
    assert split.test_tally == Tally("test", 5, 6, 18)
    assert split.left_out == (
        Tally("users with fewer than 3 events: trained on whole, not evaluated", 1, 2, 2),
        Tally("items that occur only as targets: kept in the catalogue, never trained on", 3, 2, 3),
    )


@pytest.mark.filterwarnings("ignore::sce.data.prepare.PrepareWarning")
def test_the_steps_one_by_one_write_the_dataset_of_prepare(tmp_path: Path) -> None:
    frame = pl.DataFrame(WORKED, ["user", "item", "time"], orient="row")
    options: dict[str, Any] = {"quantile": 0.5, "test_history": "full"}
    saved = split_temporal(read_interactions(frame), **options).save(tmp_path / "saved")
    prepared = prepare(frame, tmp_path / "prepared", **options)
    assert (saved.path, saved.content_hash) == (tmp_path / "saved", prepared.content_hash)
    assert saved.counts["left_out"] == prepared.counts["left_out"]


rows_strategy = st.lists(
    st.tuples(st.integers(0, 8), st.sampled_from("abcdefgh"), st.integers(0, 40)),
    min_size=1,
    max_size=80,
)


def naive_temporal(
    log: Interactions, quantile: float, history: History
) -> tuple[int, dict[int, str], dict[int, str]]:
    cut = int(np.quantile(log.timestamps, quantile, method="nearest"))
    events: dict[int, list[tuple[str, int]]] = {}
    for code, item, time in zip(log.users, log.items, log.timestamps, strict=True):
        events.setdefault(int(code), []).append((str(log.item_ids[int(item)]), int(time)))
    train = {u: list(es) for u, es in events.items() if all(time < cut for _, time in es)}
    catalogue = {item for es in train.values() for item, _ in es}
    test = {}
    for u, es in events.items():
        if u in train:
            continue
        seen = [(item, time) for item, time in es if item in catalogue]
        if history == "after-cut":
            seen = [(item, time) for item, time in seen if time >= cut]
        if len(seen) >= 3 and seen[-2][1] >= cut:
            test[u] = seen

    def letters(chosen: dict[int, list[tuple[str, int]]]) -> dict[int, str]:
        return {int(log.user_ids[u]): "".join(i for i, _ in es) for u, es in chosen.items()}

    return cut, letters(train), letters(test)


@settings(max_examples=60, deadline=None)
@given(rows_strategy, st.floats(0, 1), st.sampled_from(["after-cut", "full"]))
def test_temporal_split_equals_a_naive_loop(
    rows: list[Row], quantile: float, history: History
) -> None:
    log = log_of(rows)
    cut, train, test = naive_temporal(log, quantile, history)
    if not train or not test:
        with pytest.raises(InputError, match="no test users" if train else "no training users"):
            split_temporal(log, quantile=quantile, test_history=history)
        return
    split = split_temporal(log, quantile=quantile, test_history=history)
    assert split.cut == cut
    assert named(split, split.train) == train
    assert named(split, split.test) == test
    assert not set(train) & set(test)
    # No event from after the cut in training: the training users have none at all.
    late_users = set(log.user_ids.decode(log.users[log.timestamps >= cut]))
    assert not late_users & set(named(split, split.train))
    # Every interaction is accounted for exactly once.
    parts = [split.train_tally, split.test_tally, *split.left_out]
    assert sum(part.interactions for part in parts) == len(log)
    assert split.train_tally.users + split.test_tally.users + split.left_out[-1].users == (
        tally_parts("", [log]).users
    )


@settings(max_examples=60, deadline=None)
@given(rows_strategy)
def test_leave_one_out_equals_a_naive_loop(rows: list[Row]) -> None:
    log = log_of(rows)
    everything: dict[int | str, str] = {}
    for code, item in zip(log.users, log.items, strict=True):
        name = log.user_ids[int(code)]
        everything[name] = everything.get(name, "") + str(log.item_ids[int(item)])
    long = {name: items for name, items in everything.items() if len(items) >= 3}
    if not long:
        with pytest.raises(InputError, match="no test users"):
            split_leave_one_out(log)
        return
    split = split_leave_one_out(log)
    assert named(split, split.test) == long
    assert named(split, split.train) == {
        name: items[:-2] if name in long else items for name, items in everything.items()
    }
    assert len(split.item_ids) == tally_parts("", [log]).items
    assert len(split.user_ids) == tally_parts("", [log]).users


def test_codes_that_no_longer_occur_leave_the_vocabularies() -> None:
    log = log_of(WORKED)
    split = split_leave_one_out(log.where(log.users != 0))
    assert split.user_ids.decode(range(len(split.user_ids))) == [2, 3, 4, 5, 6]
    assert split.user_ids.decode(split.train.users) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantile": 0}, r"no training users: all of the 6 users .*raise quantile"),
        ({"quantile": 1}, r"no test users: of the 1 user .* none has 3 known events from the cut"),
        ({"quantile": -0.1}, "quantile must lie between 0 and 1"),
        ({"quantile": 1.01}, "quantile must lie between 0 and 1"),
        ({"quantile": float("nan")}, "quantile must lie between 0 and 1"),
        ({"test_history": "all"}, "test_history must be one of after-cut, full"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        split_temporal(log_of(WORKED), **options)


def test_leave_one_out_without_long_users_says_so() -> None:
    with pytest.raises(InputError, match=r"at least 3 events, and the most active of 2 .* has 2"):
        split_leave_one_out(log_of([*user(1, "ab", [1, 2]), (2, "a", 3)]))


def test_the_cut_is_exact_beyond_the_precision_of_floats() -> None:
    base = 2**60  # float64 knows multiples of 256 only from here on
    rows = [*user(1, "abc", [base, base + 1, base + 2]), *user(2, "abc", [base + 3] * 3)]
    split = split_temporal(log_of(rows), quantile=0.6)
    assert split.cut == base + 3


def test_times_are_shown_in_utc() -> None:
    assert show_time(1_508_157_092_000_000) == "2017-10-16T12:31:32Z"
    assert show_time(-1) == "1969-12-31T23:59:59.999999Z"
    assert show_time(2**62) == f"{2**62} microseconds"
