"""Rows by user, then time, then the order they came in."""

import numpy as np
import polars as pl
from numpy.typing import NDArray

Rows = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]


def sort_rows(users: NDArray[np.int32], items: NDArray[np.int32], times: NDArray[np.int64]) -> Rows:
    """The users, items and times of the same rows, by user, then time; ties keep their order."""
    if not len(users):
        return users, items, times
    low, high = int(times.min()), int(times.max())
    time_bits = (high - low).bit_length()
    if int(users.max()).bit_length() + time_bits > 63:
        return _sort_twice(users, items, times)
    # User and time in one number: a single sort, and no gathering of either afterwards.
    keys = users.astype(np.int64) << time_bits
    keys |= times - low
    if np.all(keys[1:] >= keys[:-1]):
        return users, items, times
    by_key = pl.DataFrame({"key": keys, "item": items}).sort("key", maintain_order=True)
    keys = by_key["key"].to_numpy()
    return (
        (keys >> time_bits).astype(np.int32),
        by_key["item"].to_numpy(),
        (keys & ((1 << time_bits) - 1)) + low,
    )


def _sort_twice(
    users: NDArray[np.int32], items: NDArray[np.int32], times: NDArray[np.int64]
) -> Rows:
    """For times so fine or far apart that no number holds them and the user."""
    later = (users[1:] > users[:-1]) | ((users[1:] == users[:-1]) & (times[1:] >= times[:-1]))
    if np.all(later):
        return users, items, times
    rows = pl.DataFrame({"user": users, "item": items, "time": times})
    rows = rows.sort("time", maintain_order=True).sort("user", maintain_order=True)
    return rows["user"].to_numpy(), rows["item"].to_numpy(), rows["time"].to_numpy()
