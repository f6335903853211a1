"""Batches straight from the flat arrays: one vectorised gather, no Python per user.

A sequence of events e0 … en gives a training row with history e0 … en-1 and targets e1 … en, and an
evaluation row whose last events are held out. Rows shorter than the batch is wide end with
`PADDING` in histories, `IGNORED` in targets; a batch is as wide as its longest row, at most
`max_length`.
"""

import warnings
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sce.data.prepared import NO_TIMES
from sce.errors import InputError

PADDING = -1  # in histories: outside the item table, so the catalogue has exactly C rows
IGNORED = -100  # in targets: the losses' ignore_index


class Ragged(Protocol):
    """Sequences laid end to end: row i is items[offsets[i] : offsets[i + 1]]."""

    @property
    def items(self) -> NDArray[np.int32]:
        """Items of all rows, [n]."""

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Start of each row, and the end of the last, [rows + 1]."""


@dataclass(frozen=True)
class DeviceSequences:
    """Sequences on the device where batches are made; lengths on the host, to avoid syncs."""

    items: Tensor  # int32 [n]
    offsets: Tensor  # int64 [rows + 1]
    lengths: Tensor  # int64 [rows], on the host
    times: Tensor | None = None  # int32 [n], seconds, where a model uses them

    @classmethod
    def place(
        cls, sequences: Ragged, device: torch.device | str = "cpu", *, times: bool = False
    ) -> "DeviceSequences":
        """Put sequences on a device, with the times of events or without them.

        On the CPU memory-mapped items and times are shared, not copied.
        """
        if not len(sequences.items):
            raise InputError("there are no events to make batches of")
        seconds = getattr(sequences, "times", None) if times else None
        if times and seconds is None:
            raise InputError(NO_TIMES.format("the dataset"))
        offsets = torch.from_numpy(np.array(sequences.offsets, dtype=np.int64))
        with warnings.catch_warnings():
            # A read-only memory map: nothing here ever writes to the items.
            warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
            items = torch.from_numpy(np.asarray(sequences.items)).to(device)
            known = None if seconds is None else torch.from_numpy(np.asarray(seconds)).to(device)
        return cls(items, offsets.to(device), offsets.diff(), known)

    def __len__(self) -> int:
        return len(self.lengths)


class Batch(NamedTuple):
    """Histories, and the item that came next: at each position, or after each history."""

    histories: Tensor  # int64 [b, l], PADDING where there is no event
    targets: Tensor  # int64 [b, l] or [b], IGNORED where there is none


class SeenItems(NamedTuple):
    """The items of whole histories, flat: row rows[i] of the batch has seen items[i]."""

    items: Tensor  # int64 [m]
    rows: Tensor  # int64 [m], ascending


def trainable_rows(sequences: DeviceSequences) -> Tensor:
    """Rows that give at least one pair (history, next item), on the host."""
    return (sequences.lengths >= 2).nonzero().squeeze(1)


def training_batch(
    sequences: DeviceSequences, rows: Tensor, *, max_length: int, pad_to: int | None = None
) -> Batch:
    """Gather the last `max_length` (event, next event) pairs of the sequences `rows`, on the host.

    `pad_to` is the width of the batch, for static shapes, `max_length` or more; that of the longest
    row by default.
    """
    width = _width(sequences.lengths[rows] - 1, max_length, pad_to)
    # The history is all but the last of these events, the targets are all but the first.
    positions, real = _positions(sequences, rows, max_length, width, 1)
    events = sequences.items[positions].long()
    histories = events[:, :-1].masked_fill(~real, PADDING)
    return Batch(histories, events[:, 1:].masked_fill(~real, IGNORED))


def history_batch(
    sequences: DeviceSequences, rows: Tensor, *, max_length: int, held_out: int
) -> Batch:
    """Gather the last `max_length` events before the held-out ones, and the first of these."""
    width = _width(_known_events(sequences, rows, held_out), max_length, None)
    positions, real = _positions(sequences, rows, max_length, width, held_out)
    histories = sequences.items[positions[:, :-1]].long().masked_fill(~real, PADDING)
    ends = sequences.offsets[_upload(rows, sequences) + 1]
    return Batch(histories, targets=sequences.items[ends - held_out].long())


def event_times(
    sequences: DeviceSequences, rows: Tensor, *, max_length: int, width: int, held_out: int = 1
) -> Tensor | None:
    """Gather the times of a batch's events, in seconds, and of the event after each.

    The arguments are those of the batch, and its width.

    Returns:
        [b, width + 1]: the event of a column is followed by that of the next, and the rest is
        arbitrary. None where none were placed.
    """
    if sequences.times is None:
        return None
    positions, _ = _positions(sequences, rows, max_length, width, held_out)
    return sequences.times[positions]


def seen_items(sequences: DeviceSequences, rows: Tensor, *, held_out: int) -> SeenItems:
    """Gather every event before the held-out ones, however long ago: what the users have seen."""
    device = sequences.items.device
    # The total is counted on the host: the device would have to be waited for.
    total = int(_known_events(sequences, rows, held_out).sum())
    rows = _upload(rows, sequences)
    starts = sequences.offsets[rows]
    known = sequences.offsets[rows + 1] - starts - held_out
    batch_rows = torch.arange(len(rows), device=device)
    batch_rows = batch_rows.repeat_interleave(known, output_size=total)
    firsts = starts - (known.cumsum(0) - known)
    positions = firsts[batch_rows] + torch.arange(total, device=device)
    return SeenItems(items=sequences.items[positions].long(), rows=batch_rows)


def _known_events(sequences: DeviceSequences, rows: Tensor, held_out: int) -> Tensor:
    known = sequences.lengths[rows] - held_out
    if len(known) and int(known.min()) < 0:
        raise InputError(
            f"{int((known < 0).sum())} of {len(rows)} sequences have fewer than the {held_out} "
            "events to hold out; leave these users out"
        )
    return known


def _width(available: Tensor, max_length: int, pad_to: int | None) -> int:
    if max_length < 1:
        raise InputError(f"max_length must be at least 1; it is {max_length}")
    if pad_to is not None:
        return pad_to
    longest = int(available.max()) if len(available) else 0
    return min(max(longest, 1), max_length)


def _upload(rows: Tensor, sequences: DeviceSequences) -> Tensor:
    # non_blocking: a plain copy would wait for everything that the device still has to do.
    return rows.to(sequences.items.device, non_blocking=True)


def _positions(
    sequences: DeviceSequences, rows: Tensor, max_length: int, width: int, held_out: int
) -> tuple[Tensor, Tensor]:
    """Places of the last events before the held-out ones of each row, and of the one after them.

    Returns places [b, width + 1] and real [b, width], which is true where the history has an event;
    the event at the next column follows it, and the other places are arbitrary.
    """
    rows = _upload(rows, sequences)
    ends = sequences.offsets[rows + 1] - held_out
    kept = (ends - sequences.offsets[rows]).clamp(0, max_length)
    columns = torch.arange(width + 1, device=rows.device)
    real = columns[:-1] < kept[:, None]
    return ((ends - kept)[:, None] + columns).clamp(0, len(sequences.items) - 1), real
