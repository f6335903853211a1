from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sce.data.batches import (
    IGNORED,
    PADDING,
    DeviceSequences,
    history_batch,
    seen_items,
    trainable_rows,
    training_batch,
)
from sce.errors import InputError

Rows = list[list[int]]


class Flat(NamedTuple):
    items: NDArray[np.int32]
    offsets: NDArray[np.int64]


def lay_flat(sequences: Rows) -> Flat:
    items = np.array([item for row in sequences for item in row], dtype=np.int32)
    offsets = np.cumsum([0] + [len(row) for row in sequences], dtype=np.int64)
    return Flat(items, offsets)


def place(sequences: Rows) -> DeviceSequences:
    return DeviceSequences.place(lay_flat(sequences))


def pad(rows: Rows, width: int, filler: int) -> Rows:
    return [row + [filler] * (width - len(row)) for row in rows]


@st.composite
def sequences_and_rows(draw: st.DrawFn, shortest: int = 0) -> tuple[Rows, list[int]]:
    sequence = st.lists(st.integers(0, 2**31 - 1), min_size=shortest, max_size=9)
    sequences = draw(st.lists(sequence, min_size=1, max_size=8).filter(any))
    rows = draw(st.lists(st.integers(0, len(sequences) - 1), min_size=1, max_size=6))
    return sequences, rows


@given(
    data=sequences_and_rows(),
    max_length=st.integers(1, 11),
    extra=st.none() | st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_training_batch_equals_a_loop(
    data: tuple[Rows, list[int]], max_length: int, extra: int | None
) -> None:
    sequences, rows = data
    pad_to = None if extra is None else max_length + extra
    histories = [sequences[row][:-1][-max_length:] for row in rows]
    targets = [sequences[row][1:][-max_length:] for row in rows]
    width = max(1, *map(len, histories)) if pad_to is None else pad_to

    batch = training_batch(
        place(sequences), torch.tensor(rows), max_length=max_length, pad_to=pad_to
    )

    assert batch.histories.tolist() == pad(histories, width, PADDING)
    assert batch.targets.tolist() == pad(targets, width, IGNORED)
    assert batch.histories.dtype == batch.targets.dtype == torch.int64


@given(
    data=sequences_and_rows(shortest=2),
    max_length=st.integers(1, 11),
    held_out=st.integers(1, 2),
)
@settings(max_examples=100, deadline=None)
def test_history_batch_equals_a_loop(
    data: tuple[Rows, list[int]], max_length: int, held_out: int
) -> None:
    sequences, rows = data
    histories = [sequences[row][: len(sequences[row]) - held_out][-max_length:] for row in rows]
    width = max(1, *map(len, histories))

    batch = history_batch(
        place(sequences), torch.tensor(rows), max_length=max_length, held_out=held_out
    )

    assert batch.histories.tolist() == pad(histories, width, PADDING)
    assert batch.targets.tolist() == [sequences[row][-held_out] for row in rows]


@given(data=sequences_and_rows(shortest=2), held_out=st.integers(0, 2))
@settings(max_examples=50, deadline=None)
def test_seen_items_are_the_whole_histories(data: tuple[Rows, list[int]], held_out: int) -> None:
    sequences, rows = data
    expected = [
        (item, position)
        for position, row in enumerate(rows)
        for item in sequences[row][: len(sequences[row]) - held_out]
    ]

    seen = seen_items(place(sequences), torch.tensor(rows), held_out=held_out)

    assert list(zip(seen.items.tolist(), seen.rows.tolist(), strict=True)) == expected


def test_rows_of_one_event_train_nothing_and_are_left_out() -> None:
    sequences = place([[1, 2], [], [3], [4, 5, 6]])
    assert trainable_rows(sequences).tolist() == [0, 3]
    assert len(sequences) == 4


@pytest.mark.filterwarnings("error")
def test_memory_mapped_items_are_shared_without_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "items.npy"
    np.save(path, np.arange(6, dtype=np.int32))
    mapped = np.load(path, mmap_mode="r")
    sequences = DeviceSequences.place(Flat(mapped, np.array([0, 2, 6])))
    assert sequences.items.data_ptr() == mapped.ctypes.data
    assert sequences.items.tolist() == [0, 1, 2, 3, 4, 5]


def test_what_cannot_be_a_batch_is_refused() -> None:
    sequences = place([[1, 2], [3]])
    rows = torch.tensor([0, 1])
    with pytest.raises(InputError, match="1 of 2 sequences have fewer than the 2 events"):
        history_batch(sequences, rows, max_length=3, held_out=2)
    with pytest.raises(InputError, match="max_length must be at least 1"):
        training_batch(sequences, rows, max_length=0)
    with pytest.raises(InputError, match="no events"):
        place([[]])
