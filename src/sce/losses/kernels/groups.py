"""Groups of rows, and the largest score in each.

A small group of g rows is not a run of rows but every fourth pair of one: group G has the rows

    4g (G // 4)  +  8 (i // 2)  +  2 (G % 4)  +  i % 2        for i = 0 … g - 1

which are the columns of a tile of scores that one thread holds, so that a maximum needs no other
thread. Large groups, which would not fit a tile four at a time, are runs of rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sce.losses.kernels.launch import IS_INTERPRETED, ceil_div, launch, power_of_2
from sce.losses.kernels.precision import half_name, load_rows, product_of_rows
from sce.losses.kernels.tiles import ROWS, again_tile, block, grouping_tile


class Rows(NamedTuple):
    """The rows to select from."""

    values: Tensor  # [m, d]
    targets: Tensor | None  # [m]: rows with a negative one are not picked
    dtype: torch.dtype  # to which they are rounded before they are scored


class Cut(NamedTuple):
    """Groups cut into parts: the rows of both, and if four groups interleave."""

    group: int
    part: int
    interleaved: bool


def interleaves(group: int) -> bool:
    """True if groups of this size interleave: four of them fit a tile."""
    return 1 < group <= ROWS // 4


def group_maxima(centres: Tensor, rows: Rows, group: int, n_groups: int, out: Tensor) -> None:
    """Write the largest score of each group of rows with each centre, [n, n_groups]."""
    (n, d), m, targets = centres.shape, len(rows.values), rows.targets
    half = centres.dtype == rows.dtype != torch.float32
    tile = grouping_tile(rows.values, half=half)
    local = min(group, tile.y)  # rows of a group in a tile
    passes = group // local
    launch(
        _group_maxima_kernel, (ceil_div(m, tile.y * passes),),
        centres, rows.values, rows.values if targets is None else targets, out, n, m, d, n_groups,
        rows.values.stride(0), LOCAL=local, INTERLEAVED=interleaves(group), PASSES=passes,
        TILES=power_of_2(ceil_div(n, tile.x)) if passes > 1 else 1,
        BLOCK_ROWS=tile.y, BLOCK_N=tile.x, BLOCK_D=block(d), SLICE=tile.slice,
        MASKED=targets is not None, ROUND=half_name(rows.dtype),
        PRECISION="ieee" if half else "tf32x3",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def score_again(centres: Tensor, rows: Rows, groups: Tensor, cut: Cut, out: Tensor) -> None:
    """Write the maximum of each part of the given groups, [n, groups * parts]."""
    (n, d), m, targets = centres.shape, len(rows.values), rows.targets
    block_rows, columns = again_tile(d, cut.part)
    n_rows = groups.shape[1] * cut.group
    launch(
        _score_again_kernel, (ceil_div(n_rows, block_rows) * n,),
        centres, rows.values, rows.values if targets is None else targets, groups, out, m, d,
        n_rows, rows.values.stride(0), GROUP=cut.group, INTERLEAVED=cut.interleaved, PART=cut.part,
        BLOCK_ROWS=block_rows, BLOCK_D=power_of_2(d), SLICE=columns, MASKED=targets is not None,
        ROUND=half_name(rows.dtype), num_warps=4,
    )  # fmt: skip


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _group_maxima_kernel(
    centres_ptr,  # [n, d]
    rows_ptr,  # [m, d]
    targets_ptr,  # [m], read when MASKED
    maxima_ptr,  # [n, n_groups]
    n, m, d, n_groups, stride_row,
    LOCAL: tl.constexpr, INTERLEAVED: tl.constexpr, PASSES: tl.constexpr, TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
    MASKED: tl.constexpr, ROUND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = BLOCK_ROWS // LOCAL
    block = tl.program_id(0).to(tl.int64)
    i_d = tl.arange(0, SLICE)
    i_group = block * GROUPS + tl.arange(0, GROUPS)
    i_tile = tl.arange(0, TILES)
    so_far = tl.full((TILES, BLOCK_N), float("-inf"), tl.float32)
    for step in range(PASSES):
        i_row = (block * PASSES + step) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = i_row < m
        if MASKED:
            mask = mask & (tl.load(targets_ptr + i_row, mask=mask, other=-1) >= 0)
        rows = load_rows(rows_ptr, i_row, mask, stride_row, 0, d, SLICE, ROUND)
        floor = tl.where(mask, float("inf"), float("-inf"))  # a minimum with it masks a score
        for start in range(0, n, BLOCK_N):
            i_n = start + tl.arange(0, BLOCK_N)
            in_n = i_n < n
            at = centres_ptr + i_n[:, None] * d + i_d[None, :]
            centres = tl.load(at, mask=in_n[:, None] & (i_d < d)[None, :], other=0.0)
            scores = product_of_rows(
                centres, rows, centres_ptr, i_n, in_n, d, rows_ptr, i_row, mask, stride_row, d,
                BLOCK_D, SLICE, "", ROUND, PRECISION,
            )  # fmt: skip
            # NaN is lost in a common maximum: it must win, reach the loss, and be noticed there.
            if IS_INTERPRETED:
                scores = tl.where(scores == scores, scores, float("inf"))
            scores = tl.minimum(scores, floor[None, :], propagate_nan=tl.PropagateNan.ALL)
            best = scores
            if INTERLEAVED:
                best = tl.reshape(scores, (BLOCK_N, GROUPS // 4, LOCAL // 2, 4, 2))
                if IS_INTERPRETED:
                    best = tl.max(tl.max(best, axis=4), axis=2)
                else:
                    best = tl.reduce(tl.reduce(best, 4, _larger), 2, _larger)
                best = tl.reshape(best, (BLOCK_N, GROUPS))
            elif LOCAL > 1:
                best = tl.reshape(scores, (BLOCK_N, GROUPS, LOCAL))
                best = tl.max(best, axis=2) if IS_INTERPRETED else tl.reduce(best, 2, _larger)
            if PASSES > 1:
                # One group, and more of it to come: its maxima wait on the chip.
                its = i_tile[:, None] == start // BLOCK_N
                now = tl.reshape(best, (1, BLOCK_N))
                now = tl.maximum(so_far, now, propagate_nan=tl.PropagateNan.ALL)
                so_far = tl.where(its, now, so_far)
            else:
                at = maxima_ptr + i_n[:, None].to(tl.int64) * n_groups + i_group[None, :]
                tl.store(at, best, mask=in_n[:, None] & (i_group < n_groups)[None, :])
    if PASSES > 1:
        i_n = i_tile[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(maxima_ptr + i_n.to(tl.int64) * n_groups + block, so_far, mask=i_n < n)


@triton.jit
def rows_of(group, i, GROUP: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the i-th row of a group."""
    if not INTERLEAVED:
        return group.to(tl.int64) * GROUP + i
    return (group // 4).to(tl.int64) * (4 * GROUP) + (i // 2) * 8 + 2 * (group % 4) + i % 2


@triton.jit
def scores_of(
    centre_ptr, rows_ptr, row, mask, stride_row, d,
    BLOCK_D: tl.constexpr, SLICE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Return the scores of rows with one centre in float32, where NaN is infinity."""
    i_d = tl.arange(0, SLICE)
    centre_ptr += i_d
    centre = tl.load(centre_ptr, mask=i_d < d, other=0.0).to(tl.float32)
    rows = load_rows(rows_ptr, row, mask, stride_row, 0, d, SLICE, ROUND).to(tl.float32)
    scores = tl.sum(rows * centre[None, :], axis=1)
    if SLICE < BLOCK_D:
        for first in range(SLICE, d, SLICE):
            centre = tl.load(centre_ptr + first, mask=first + i_d < d, other=0.0).to(tl.float32)
            more = load_rows(rows_ptr, row, mask, stride_row, first, d, SLICE, ROUND)
            scores += tl.sum(more.to(tl.float32) * centre[None, :], axis=1)
    return tl.where(scores == scores, scores, float("inf"))


@triton.jit
def _score_again_kernel(
    centres_ptr,  # [n, d]
    rows_ptr,  # [m, d]
    targets_ptr,  # [m], read when MASKED
    groups_ptr,  # [n, n_rows / GROUP]
    maxima_ptr,  # [n, n_rows / PART]
    m, d, n_rows, stride_row,
    GROUP: tl.constexpr, INTERLEAVED: tl.constexpr, PART: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, SLICE: tl.constexpr, MASKED: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = BLOCK_ROWS // PART
    tiles = tl.cdiv(n_rows, BLOCK_ROWS)  # only one axis of a grid is long
    bucket = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    i = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask = i < n_rows
    group = tl.load(groups_ptr + bucket * (n_rows // GROUP) + i // GROUP, mask=mask, other=0)
    row = rows_of(group, i % GROUP, GROUP, INTERLEAVED)
    mask = mask & (row < m)
    if MASKED:
        mask = mask & (tl.load(targets_ptr + row, mask=mask, other=-1) >= 0)
    centre_ptr = centres_ptr + bucket * d
    scores = scores_of(centre_ptr, rows_ptr, row, mask, stride_row, d, BLOCK_D, SLICE, ROUND)
    scores = tl.where(mask, scores, float("-inf"))
    if PART > 1:
        scores = tl.max(tl.reshape(scores, (PARTS, PART)), axis=1)
    i_part = tile * PARTS + tl.arange(0, PARTS)
    n_parts = n_rows // PART
    tl.store(maxima_ptr + bucket * n_parts + i_part, scores, mask=i_part < n_parts)
