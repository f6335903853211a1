"""All users of the log in the prepared dataset, each with a whole history."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.data.prepare import prepare
from sce.data.prepared import PreparedDataset
from sce.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore::sce.data.prepare.PrepareWarning")
OPTIONS: list[dict[str, Any]] = [
    {"quantile": 0.7},
    {"quantile": 0.7, "test_history": "full", "min_item_users": 2, "min_user_items": 3},
    {"split": "leave-one-out", "min_item_users": 2, "min_user_items": 2, "iterate": True},
    {"split": "leave-one-out", "drop_repeats": True},
    {"split": "none"},
]


def histories(dataset: PreparedDataset) -> dict[Any, list[Any]]:
    """Every user of the log, by id, with the ids of the items."""
    users = dataset.everyone.decode(range(len(dataset.everyone)))
    found = dataset.histories(dataset.everyone.lookup(users))
    return {user: dataset.item_ids.decode(items) for user, items in zip(users, found, strict=True)}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), min_size=20, max_size=80),
    st.sampled_from(OPTIONS),
)
def test_everybody_has_every_event_of_the_catalogue(
    pairs: list[tuple[int, int]], options: dict[str, Any]
) -> None:
    frame = pl.DataFrame(pairs, ["user", "item"], orient="row").with_row_index("time")
    with TemporaryDirectory() as path:
        try:
            dataset = prepare(frame, Path(path) / "data", **options)
        except InputError:  # nothing is left
            return
        catalogue = set(dataset.item_ids.decode(range(dataset.n_items)))
        expected: dict[int, list[int]] = {user: [] for user, _ in sorted(pairs)}
        for user, item in pairs:
            repeated = options.get("drop_repeats") and item in expected[user]
            if item in catalogue and not repeated:
                expected[user].append(item)
        assert histories(dataset) == expected


def test_what_the_split_has_whole_is_not_stored_again(tmp_path: Path) -> None:
    rows = [(1, item, time) for time, item in enumerate("abc")]
    rows += [(2, "c", 1), (2, "a", 9), (2, "b", 9), (2, "c", 9)]
    frame = pl.DataFrame(rows, ["user", "item", "time"], orient="row")
    for split, again in (("none", []), ("leave-one-out", []), ("temporal", [2])):
        dataset = prepare(frame, tmp_path / split, split=split)  # type: ignore[arg-type]
        assert dataset.everyone.decode(dataset.whole.users) == again


def test_altered_whole_histories_are_refused(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": [1] * 4 + [2] * 5, "item": [*"abcdabcda"], "time": range(9)})
    dataset = prepare(frame, tmp_path / "data", quantile=0.6)
    file = dataset.path / "whole_items.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"whole_items\.npy was altered"):
        PreparedDataset.load(dataset.path)


def test_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": [1, 2], "item": ["a", "a"], "time": [1, 2]})
    with pytest.raises(InputError, match="no user has two events"):
        prepare(frame, tmp_path / "data", split="none")
