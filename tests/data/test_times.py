"""Times of events in the prepared dataset, and in batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

from sce.data.batches import DeviceSequences, event_times, history_batch, training_batch
from sce.data.prepare import prepare
from sce.data.prepared import PreparedDataset, Sequences
from sce.data.requests import since_first
from sce.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore::sce.data.prepare.PrepareWarning")
START = 1_600_000_000
ROWS = [
    (1, "a", 0.0), (1, "b", 0.9), (1, "c", 1.2), (1, "a", 90.0),
    (2, "b", 5.0), (2, "c", 4e9), (2, "a", 4e9 + 1), (2, "b", 4e9 + 2),
    (3, "a", 7.0), (3, "b", 7.0), (3, "c", 8.0),
]  # fmt: skip
FRAME = pl.DataFrame(
    [(user, item, START + time) for user, item, time in ROWS],
    ["user", "item", "time"],
    orient="row",
)


def since(dataset: PreparedDataset, user: int) -> list[int]:
    (found,) = dataset.histories(dataset.everyone.lookup([user]), "times")
    return [int(time) for time in found]


def test_every_way_of_preparing_keeps_whole_seconds_since_the_first_event(tmp_path: Path) -> None:
    FRAME.write_csv(tmp_path / "log.csv")
    FRAME.write_parquet(tmp_path / "log.parquet")
    ways: list[tuple[Any, dict[str, Any]]] = [
        (FRAME, {}),
        (pd.DataFrame(FRAME.to_dict(as_series=False)), {}),
        (tmp_path / "log.csv", {}),
        (tmp_path / "log.parquet", {"memory": "1GB"}),
    ]
    found = []
    for number, (source, options) in enumerate(ways):
        made = prepare(source, tmp_path / str(number), split="leave-one-out", **options)
        dataset = PreparedDataset.load(made.path)
        most = np.iinfo(np.int32).max
        assert since(dataset, 1) == [0, 0, 1, 90]
        assert since(dataset, 2) == [0, most, most, most]  # more than a life
        assert since(dataset, 3) == [0, 0, 1]
        assert dataset.train.times is not None
        assert dataset.train.times.tolist() == [0, 0, 0, most, 0]
        found.append((dataset.content_hash, dataset.times_hash))
    assert len(set(found)) == 1
    assert found[0][1]


def test_a_log_in_the_order_of_rows_has_none(tmp_path: Path) -> None:
    dataset = prepare(FRAME.drop("time"), tmp_path / "data", order="rows")
    assert (dataset.train.times, dataset.times_hash) == (None, "")
    assert not [*dataset.path.glob("*times*")]
    with pytest.raises(InputError, match=r"has no times of events .* prepare a log with times"):
        since(dataset, 1)
    with pytest.raises(InputError, match="has no times of events"):
        DeviceSequences.place(dataset.train, times=True)


def test_times_are_no_part_of_the_content(tmp_path: Path) -> None:
    one = prepare(FRAME, tmp_path / "one", split="leave-one-out")
    later = FRAME.with_columns(pl.col("time") * 2)
    other = prepare(later, tmp_path / "other", split="leave-one-out")
    assert other.content_hash == one.content_hash
    assert other.times_hash != one.times_hash


def test_times_are_those_of_the_items(tmp_path: Path) -> None:
    items = np.arange(3, dtype=np.int32)
    with pytest.raises(ValueError, match="2 times of 3 items"):
        Sequences(items, np.array([0, 3]), items[:1], items[:2])
    dataset = prepare(FRAME, tmp_path / "data", split="leave-one-out")
    renamed = dataset.with_items(dataset.item_ids.insert(["aa"])[0])
    assert renamed.train.times is dataset.train.times


def test_batches_have_the_times_of_events_and_of_the_one_after_each() -> None:
    items = np.arange(9, dtype=np.int32)
    sequences = DeviceSequences.place(
        Sequences(items, np.array([0, 4, 9]), items[:2], 10 * items), times=True
    )
    rows = torch.tensor([0, 1])
    histories, targets = training_batch(sequences, rows, max_length=3)
    times = event_times(sequences, rows, max_length=3, width=3)
    assert times is not None
    assert torch.equal(times[:, :-1], 10 * histories)
    assert torch.equal(times[:, 1:], 10 * targets)
    for held_out in (1, 2):
        histories, targets = history_batch(sequences, rows, max_length=4, held_out=held_out)
        width = histories.shape[1]
        times = event_times(sequences, rows, max_length=4, width=width, held_out=held_out)
        assert times is not None
        for history, target, found in zip(histories, targets, times, strict=True):
            known = history[history >= 0]
            assert torch.equal(found[: len(known)], 10 * known)
            assert found[len(known)] == 10 * target
    plain = DeviceSequences.place(Sequences(items, np.array([0, 4, 9]), items[:2], items))
    assert event_times(plain, rows, max_length=3, width=3) is None


def test_seconds_of_any_size_count_from_the_first() -> None:
    most = np.iinfo(np.int32).max
    assert since_first([10**30, 10**30 + 5, 10**40, 3]).tolist() == [0, 5, most, 0]
    assert since_first([]).dtype == np.int32
