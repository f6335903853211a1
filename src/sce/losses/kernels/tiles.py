"""Sizes of the tiles on the chip, for each kernel, width and precision.

Up to 64 columns they were tuned on an H200, those of `full.py` also at 256 and 512, those inside
buckets at 128 and 256 in half precision, by autocast too. Other wide rows were chosen by what the
compiler makes of them, for sm_90 and sm_86: no registers spill to memory, and shared memory stays
below the 99 KiB that small chips have. What grows with the width is either cut into slices of
columns, read again for each tile (a product of float32 rows is slow enough for the cache to keep
up), or spread over more warps.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from sce.losses.kernels.launch import power_of_2
from sce.losses.kernels.precision import half_name

# Rows of a tile in `group_maxima`, at least: what small groups interleave within.
ROWS = 128
# Matrix units of chips with less shared memory than this read registers alone.
_AMPLE = 200 << 10


class Tile(NamedTuple):
    """The shape in which a program multiplies rows of one matrix, x, with those of another, y."""

    x: int  # rows at a time
    y: int
    slice: int  # columns at a time; where these are all, the outer rows are read once and held
    warps: int = 4
    stages: int = 2
    registers: int | None = None  # of a thread, at most: fewer let more programs run at once


def block(d: int) -> int:
    """Return the columns of a tile of whole rows."""
    return max(16, power_of_2(d))


def _whole(d: int, device: torch.device, *, half: bool) -> bool:
    """True if rows are narrow enough for the tuned tiles, of whole rows.

    On a small chip 64 columns of float32 are not narrow: they would take 112 KiB.
    """
    return d <= 32 or (d <= 64 and (half or not _is_small(device)))


def _is_small(device: torch.device) -> bool:
    return device.type == "cuda" and _shared_memory(device.index) < _AMPLE


@functools.cache
def _shared_memory(index: int) -> int:
    driver: Any = triton.runtime.driver.active
    found: int = driver.utils.get_device_properties(index)["max_shared_mem"]
    return found


def _is_blackwell(device: torch.device) -> bool:
    """True for chips newer than Hopper, on which Triton takes more shared memory for a product."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


def grouping_tile(rows: Tensor, *, half: bool) -> Tile:
    """Choose for `group_maxima`: x are centres, y rows; half: both are, once rounded."""
    d = block(rows.shape[1])
    if _whole(d, rows.device, half=half):
        return Tile(64, 256, d) if half else Tile(64, ROWS, d, stages=3)
    if not half:
        # The largest tile whose operands, each number of which is split in two, fit the registers.
        return Tile(64 if _is_small(rows.device) else 128, ROWS, 32, warps=8, stages=3)
    if d <= 256:
        # Rows are read once; only centres come from the cache again. At 256 columns one stage: two
        # programs on a processor hide each other's loads, where a second stage leaves room for one.
        return Tile(64, ROWS, d, stages=2 if d <= 128 else 1)
    # What is rounded waits in float32: a third stage of it would take 128 KiB.
    return Tile(128, ROWS, 64, warps=8, stages=2 if rows.dtype == torch.float32 else 3)


def again_tile(d: int, part: int) -> tuple[int, int]:
    """Choose for `score_again`: rows, a whole part at least, and columns."""
    d = power_of_2(d)
    rows = max(16, min(128, 8192 // d), part)
    return rows, min(d, 16384 // rows)


class Tiles:
    """Tiles of the kernels inside buckets; x are states, y items."""

    def __init__(
        self, states: Tensor, catalogue: Tensor, autocast_dtype: torch.dtype | None
    ) -> None:
        self.d = d = block(states.shape[1])
        same = states.dtype if states.dtype == catalogue.dtype else None
        self.round = half_name(autocast_dtype or same)  # both in this half precision, if any
        half, rounds = bool(self.round), autocast_dtype is not None
        ample = not _is_small(states.device)
        self.precision = "ieee" if half else "tf32x3"
        # Both: the losses with the gradients of the states.
        if _whole(d, states.device, half=half):
            self.forward = Tile(64, 128, d) if half else Tile(128, 64, d)
            self.states = Tile(32, 128, d, stages=3) if half else Tile(32, 64, d)
            self.both, self.places = self.states, Tile(32, 64, d)
            if half:
                self.places = Tile(32 if rounds else 16, 64 if rounds else 128, d, 4, 1, 128)
            if rounds and ample:
                self.both = Tile(32, 128, d, registers=128)
            elif half:
                self.both = Tile(64, 128, d, stages=3, registers=168 if ample else None)
            return
        if half:
            self.forward = Tile(64, 64, d if d <= 128 else 64)
        else:
            self.forward = Tile(64, 64, 32, stages=3)
        # The sums of a gradient are as wide as rows: the wider, the fewer of them.
        if d <= 128:
            self.states = self.places = Tile(64, 64, 64, 8) if half else Tile(64, 32, 32, 8)
        elif d <= 256:
            self.states = self.places = Tile(32, 32, 32, 8)
        else:
            self.places = Tile(16, 32, 32, 8)
            self.states = Tile(32, 16, 32, 8) if half else self.places
        self.both = self.states
        if half and ample and d <= 256:
            self.both = Tile(64, 128 if d <= 128 else 64, d)
            self.places = Tile(16 if d <= 128 else 32, 64, d, stages=1)


def full_tiles(states: Tensor, catalogue: Tensor) -> tuple[Tile, Tile]:
    """Choose for `full.py`, for states and for items: x are summed for, y are run over.

    Both in half precision, once rounded. The sums are as wide as rows: the wider, the fewer.
    """
    d = block(states.shape[1])
    # Weights in two halves take as many registers again.
    whole = torch.float32 not in (states.dtype, catalogue.dtype)
    if d <= 64:
        if whole:
            return Tile(128, 64, d, 8, 3), Tile(128, 128, d, 8)
        return Tile(128, 64, d, 4, 3), Tile(64, 64, d, 4, 3)
    if d <= 128:
        return Tile(128, 64, d, 8, 3), Tile(64, 64, d, 4, 3)
    if _is_small(states.device) or (d > 256 and not whole):
        both = Tile(32, 32 if d <= 256 else 16, d, 8)
    else:  # a stage more would take 228 and 257 KiB on a Blackwell
        stages = (3 if d <= 256 else 2) - _is_blackwell(states.device)
        both = Tile(128 if d <= 256 else 64, 64, d, 8, stages)
    return both, both


def mixing_tile(d: int) -> Tile:
    """Choose for `centres.py`: x are centres, y states, whose number divides 32.

    The sums are as wide as rows, and always in float32.
    """
    d = block(d)
    if d <= 128:
        return Tile(64, 32, d, 4 if d <= 64 else 8)
    return Tile(32, 32, d, 8) if d <= 256 else Tile(16, 16, d, 8)
