from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.data.interactions import GrowingArrays, Interactions, Tally, stored_log, tally_parts
from sce.data.manifest import write_array
from sce.data.splitting import _nearest
from sce.data.vocabulary import Vocabulary

ITEMS = Vocabulary.from_integers([5, 6, 7])


def part_of(users: list[str], items: list[int]) -> Interactions:
    ids = Vocabulary.from_strings(users)
    codes = ids.lookup(users).astype(np.int32)
    return Interactions(codes, np.array(items, np.int32), np.arange(len(users)), ids, ITEMS)


def test_parts_on_disk_are_those_that_were_stored(tmp_path: Path) -> None:
    one, two = part_of(["ann", "ann", "bob"], [0, 1, 1]), part_of(["ü"], [2])
    log = stored_log(tmp_path / "log", "string", ITEMS)
    log.append(one)
    log.append(two)
    for found, expected in zip(log, (one, two), strict=True):
        assert found.user_ids == expected.user_ids
        for name in ("users", "items", "timestamps"):
            array = getattr(found, name)
            assert isinstance(array.base, np.memmap)
            np.testing.assert_array_equal(array, getattr(expected, name), strict=True)
    assert tally_parts("all", log) == tally_parts("all", [one, two]) == Tally("all", 3, 3, 4)
    used = log[0]
    log[0] = one.where(one.items == 1)
    assert (log[0].items.tolist(), used.items.tolist(), len(log)) == ([1, 1], [0, 1, 1], 2)
    log.clear()
    assert (len(log), [*(tmp_path / "log").iterdir()]) == (0, [])


def test_a_copy_keeps_the_parts_that_are_replaced_later(tmp_path: Path) -> None:
    one = part_of(["ann", "ann", "bob"], [0, 1, 1])
    log = stored_log(tmp_path / "log", "string", ITEMS)
    log.append(one)
    before = log.copy()
    for kept in ([1, 2], [2]):
        log[0] = one.where(np.isin(np.arange(3), kept))
    assert (before[0].items.tolist(), log[0].items.tolist()) == ([0, 1, 1], [1])
    assert len({file.name[:6] for file in (tmp_path / "log").iterdir()}) == 2


@pytest.mark.parametrize("make", [Vocabulary.from_integers, Vocabulary.from_strings])
def test_vocabularies_grow_at_their_end(make: Any, tmp_path: Path) -> None:
    text = make == Vocabulary.from_strings
    groups = [["a", "bb"], [], ["bb0"], ["x", "üß"]] if text else [[-1, 22], [], [333], [4444]]
    whole = make([one for group in groups for one in group])
    for directory in (None, tmp_path):
        arrays = GrowingArrays(directory)
        for group in groups:
            arrays.append_ids("ids", make(group))
        assert Vocabulary.from_arrays(whole.kind, arrays.take("ids")) == whole
    for name, array in whole.arrays().items():
        write_array(tmp_path / "expected", array)
        assert (tmp_path / f"ids_{name}.npy").read_bytes() == (tmp_path / "expected").read_bytes()


times = st.integers(0, 9) | st.integers(-(2**63), 2**63 - 1)


@settings(deadline=None)
@given(st.lists(st.lists(times), min_size=1), st.floats(0, 1))
def test_the_quantile_is_that_of_numpy(lists: list[list[int]], quantile: float) -> None:
    everything = np.array([time for one in lists for time in one], np.int64)
    if not len(everything):
        return
    none = np.zeros(len(everything), np.int32)
    parts = [
        Interactions(none[: len(one)], none[: len(one)], np.array(one, np.int64), ITEMS, ITEMS)
        for one in lists
    ]
    # By place: numpy interpolates between numbers that far apart.
    place = np.quantile(np.arange(len(everything)), quantile, method="nearest")
    assert _nearest(parts, quantile) == np.sort(everything)[int(place)]
