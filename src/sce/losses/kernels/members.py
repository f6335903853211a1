"""The nearest bucket of each state, and the tiles of the list of states by bucket."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sce.losses.kernels.launch import ceil_div, launch
from sce.losses.kernels.precision import load_rows, product_of_rows
from sce.losses.kernels.tiles import Tiles

_BUCKETS = tl.constexpr(1024)  # that a program looks at at once


def count_tiles(states: Tensor, offsets: Tensor, block: int) -> int:
    """Return the most tiles, each of at most `block` states of one bucket."""
    return len(states) // block + len(offsets) - 1


def nearest_buckets(
    x: Tensor,  # [n, d]
    centres: Tensor,  # [n_buckets, d], of length one
    targets: Tensor,  # [n]; negative: the state is not valid
    autocast_dtype: torch.dtype | None,
) -> Tensor:
    """Return the bucket with the nearest centre for each state [n]; n_buckets if not valid."""
    (n, d), n_buckets = x.shape, len(centres)
    # They are sorted, in half the time if they are short.
    dtype = torch.int16 if n_buckets < 1 << 15 else torch.int32
    out = torch.empty(n, device=x.device, dtype=dtype)
    tiles = Tiles(x, centres, autocast_dtype)
    tile = tiles.forward
    launch(
        _nearest_kernel, (ceil_div(n, tile.x),),
        x, centres, targets, out, n, n_buckets, d, x.stride(0), centres.stride(0),
        BLOCK_X=tile.x, BLOCK_Y=tile.y, BLOCK_D=tiles.d, SLICE=tile.slice, ROUND=tiles.round,
        PRECISION=tiles.precision, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit
def tile_of_bucket(offsets_ptr, n_buckets, BLOCK: tl.constexpr):
    """Return the bucket of this program's tile, and its first and last place in the list.

    Where there is no such tile, both places are 0.
    """
    tile = tl.program_id(0)
    bucket = 0
    first = 0
    last = 0
    before = 0
    for start in range(0, n_buckets, _BUCKETS):
        i = start + tl.arange(0, _BUCKETS)
        begin = tl.load(offsets_ptr + i, mask=i < n_buckets, other=0)
        end = tl.load(offsets_ptr + i + 1, mask=i < n_buckets, other=0)
        tiles = (end - begin + BLOCK - 1) // BLOCK
        up_to = before + tl.cumsum(tiles, axis=0)
        mine = (tile < up_to) & (tile >= up_to - tiles)
        bucket += tl.sum(tl.where(mine, i, 0), axis=0)
        first += tl.sum(tl.where(mine, begin + (tile - up_to + tiles) * BLOCK, 0), axis=0)
        last += tl.sum(tl.where(mine, end, 0), axis=0)
        before += tl.sum(tiles, axis=0)
    return tl.cast(bucket, tl.int64), first, last


@triton.jit
def _nearest_kernel(
    x_ptr, centres_ptr, targets_ptr, out_ptr, n, n_buckets, d, stride_x, stride_centres,
    BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
    ROUND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    valid = tl.load(targets_ptr + row, mask=row < n, other=-1) >= 0
    x = load_rows(x_ptr, row, valid, stride_x, 0, d, SLICE, ROUND)
    best = tl.full((BLOCK_X,), float("-inf"), tl.float32)
    nearest = tl.zeros((BLOCK_X,), tl.int32)
    for start in range(0, n_buckets, BLOCK_Y):
        i = start + tl.arange(0, BLOCK_Y)
        inside = i < n_buckets
        centres = load_rows(centres_ptr, i, inside, stride_centres, 0, d, SLICE, ROUND)
        scores = product_of_rows(
            x, centres, x_ptr, row, valid, stride_x, centres_ptr, i, inside, stride_centres, d,
            BLOCK_D, SLICE, ROUND, ROUND, PRECISION,
        )  # fmt: skip
        scores = tl.where(inside[None, :], scores, float("-inf"))
        most = tl.max(scores, axis=1)
        # Of equal scores the lowest bucket has it.
        lowest = tl.min(tl.where(scores == most[:, None], i[None, :], 2147483647), axis=1)
        nearest = tl.where(most > best, lowest, nearest)
        best = tl.maximum(most, best)
    nearest = tl.where(valid, nearest, n_buckets)
    tl.store(out_ptr + row, nearest.to(out_ptr.dtype.element_ty), mask=row < n)
