"""Exact top-k rows of a catalogue for each centre, in one pass and a few megabytes.

The rows are cut into groups. A row among the k best of a bucket lies in a group whose maximum is
among the k best maxima: if k groups had a larger maximum, k rows would score higher. So one pass
keeps only the maximum of each group, the k best groups are cut into smaller ones and scored again,
and so on down to single rows. Nothing is random, no two programs write to the same place, and the
host never waits for the device.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# The most maxima of groups held at once (16 MiB).
MAX_MAXIMA = 1 << 22
# How many parts a group is cut into at each further level.
PARTS = 32
# The most values of a row that one program of the selection holds.
MAX_WIDTH = 1 << 14
# The smallest first groups: larger ones save memory, smaller ones save work further down.
MIN_GROUP = 32


@torch.no_grad()
def top_rows(centres: Tensor, rows: Tensor, k: int, *, valid: Tensor | None = None) -> Tensor:
    """Return the k rows with the largest dot product with each centre, as ascending indices [b, k].

    Rows that are not `valid` [m] come last, in no particular order. Centres in the precision of
    the rows are scored by matrix units of that precision; others as float32.
    """
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    centres = centres if centres.dtype == rows.dtype else centres.float()
    n, m = len(centres), len(rows)
    if k >= m:
        return torch.arange(m, device=rows.device).expand(n, m)
    at_once = max(1, MAX_MAXIMA // ((k + _spare(k)) * PARTS))
    parts = [_top_rows(part, rows, k, valid) for part in centres.split(at_once)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _top_rows(centres: Tensor, rows: Tensor, k: int, valid: Tensor | None) -> Tensor:
    group = first_group(len(centres), len(rows), k)
    # Scores of the first pass come from matrix units, those of the last one from plain sums. The
    # groups taken beyond k absorb the difference in rounding.
    spare = _spare(k)
    maxima = _group_maxima(centres, rows, group, valid)
    groups = _best(maxima, k if group == 1 else k + spare)
    while group > 1:
        parts = min(group, PARTS)
        part = group // parts
        maxima = _part_maxima(centres, rows, groups, group, part, valid)
        groups = _best(maxima, k if part == 1 else k + spare, groups, parts)
        group = part
    return groups


def _spare(k: int) -> int:
    return max(8, k // 16)


def first_group(n: int, m: int, k: int) -> int:
    """Return the size of the first groups, a power of two: few enough groups, but enough for k."""
    wanted = max(MIN_GROUP, n * m / MAX_MAXIMA)
    return 1 << max(0, min(math.ceil(math.log2(wanted)), int(math.log2(max(1, m / (4 * k))))))


def _best(values: Tensor, k: int, groups: Tensor | None = None, parts: int = 1) -> Tensor:
    """Return the columns of each row's k largest values, ascending; ties go to the lower column.

    With `groups` [n, g], each of which was cut into `parts` columns, return the number of the part
    among all parts of all groups instead of the column.
    """
    n, width = values.shape
    k = min(k, width)
    best = torch.empty(n, k, device=values.device, dtype=torch.int64)
    block = min(MAX_WIDTH, triton.next_power_of_2(width))
    _best_kernel[(n,)](
        values,
        values if groups is None else groups,
        best,
        width,
        k,
        0 if groups is None else groups.shape[1],
        PARTS=parts,
        BLOCKS=triton.cdiv(width, block),
        BLOCK=block,
        WITH_GROUPS=groups is not None,
        num_warps=8 if block > 4096 else 4,
    )
    return best


@triton.jit
def _ordered(ptr, i, width):
    """Load float32 numbers as integers of the same order, below all of them what is not there."""
    bits = tl.load(ptr + i, mask=i < width, other=0.0).to(tl.int32, bitcast=True)
    return tl.where(i < width, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -2147483648)


@triton.jit
def _best_kernel(
    values_ptr,  # [n, width] float32
    groups_ptr,  # [n, n_groups], read WITH_GROUPS
    best_ptr,  # [n, k]
    width,
    k,
    n_groups,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    WITH_GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    values_ptr += row * width
    i = tl.arange(0, BLOCK)
    keys = _ordered(values_ptr, i, width)
    # The k-th largest key, found bit by bit from the top: the largest number that k keys reach.
    least = -2147483648
    for bit in range(32):
        tried = least + (1 << (31 - bit)) if bit > 0 else 0
        reach = tl.sum((keys >= tried).to(tl.int32), axis=0)
        for block in range(1, BLOCKS):
            more = _ordered(values_ptr, block * BLOCK + i, width)
            reach += tl.sum((more >= tried).to(tl.int32), axis=0)
        least = tl.where(reach >= k, tried, least)
    above = tl.sum((keys > least).to(tl.int32), axis=0)
    for block in range(1, BLOCKS):
        more = _ordered(values_ptr, block * BLOCK + i, width)
        above += tl.sum((more > least).to(tl.int32), axis=0)
    room = k - above  # for keys equal to the k-th, lowest columns first
    written = 0
    for block in range(BLOCKS):
        column = block * BLOCK + i
        if BLOCKS > 1:
            keys = _ordered(values_ptr, column, width)
        equal = (keys == least).to(tl.int32)
        taken = (keys > least) | ((equal > 0) & (tl.cumsum(equal, axis=0) <= room))
        room -= tl.sum(equal, axis=0)
        order = written + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        written += tl.sum(taken.to(tl.int32), axis=0)
        number = column.to(tl.int64)
        if WITH_GROUPS:
            group = tl.load(groups_ptr + row * n_groups + column // PARTS, mask=taken, other=0)
            number = group * PARTS + column % PARTS
        tl.store(best_ptr + row * k + order, number, mask=taken)


def _group_maxima(centres: Tensor, rows: Tensor, group: int, valid: Tensor | None) -> Tensor:
    n, m, d = len(centres), len(rows), rows.shape[1]
    n_groups = triton.cdiv(m, group)
    maxima = torch.empty(n, n_groups, device=rows.device, dtype=torch.float32)
    block_d = max(16, triton.next_power_of_2(d))
    block_rows = 128 if block_d <= 128 else 64
    groups_in_block = max(1, block_rows // group)
    blocks_in_group = max(1, group // block_rows)
    block_n = 64 if block_d <= 128 else 32
    grid = (triton.cdiv(n_groups, groups_in_block), triton.cdiv(n, block_n))
    _group_maxima_kernel[grid](
        centres,
        rows,
        rows if valid is None else valid,
        maxima,
        n,
        m,
        d,
        n_groups,
        rows.stride(0),
        GROUP=min(group, block_rows),
        BLOCKS_IN_GROUP=blocks_in_group,
        BLOCK_ROWS=block_rows,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        MASKED=valid is not None,
        PRECISION="ieee" if centres.dtype == rows.dtype != torch.float32 else "tf32x3",
        num_warps=4,
    )
    return maxima


@triton.jit
def _group_maxima_kernel(
    centres_ptr,  # [n, d], in the type of the rows
    rows_ptr,  # [m, d]
    valid_ptr,  # [m], read when MASKED
    maxima_ptr,  # [n, n_groups]
    n,
    m,
    d,
    n_groups,
    stride_row,
    GROUP: tl.constexpr,
    BLOCKS_IN_GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    GROUPS: tl.constexpr = BLOCK_ROWS // GROUP
    block = tl.program_id(0).to(tl.int64)
    i_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    i_d = tl.arange(0, BLOCK_D)
    centres = tl.load(
        centres_ptr + i_n[:, None] * d + i_d[None, :],
        mask=(i_n < n)[:, None] & (i_d < d)[None, :],
        other=0.0,
    )
    best = tl.full((BLOCK_N, GROUPS), float("-inf"), tl.float32)
    for part in range(BLOCKS_IN_GROUP):
        i_row = (block * BLOCKS_IN_GROUP + part) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        there = i_row < m
        rows = tl.load(
            rows_ptr + i_row[:, None] * stride_row + i_d[None, :],
            mask=there[:, None] & (i_d < d)[None, :],
            other=0.0,
        )
        if MASKED:
            there = there & tl.load(valid_ptr + i_row, mask=there, other=0).to(tl.int1)
        if rows.dtype != centres.dtype:
            rows = rows.to(tl.float32)
        scores = tl.dot(centres, tl.trans(rows), input_precision=PRECISION)
        # NaN is lost in a maximum: as infinity it wins, reaches the loss, and is NaN again there.
        scores = tl.where(scores == scores, scores, float("inf"))
        scores = tl.where(there[None, :], scores, float("-inf"))
        best = tl.maximum(best, tl.max(tl.reshape(scores, (BLOCK_N, GROUPS, GROUP)), axis=2))
    i_group = block * GROUPS + tl.arange(0, GROUPS)
    tl.store(
        maxima_ptr + i_n[:, None].to(tl.int64) * n_groups + i_group[None, :],
        best,
        mask=(i_n < n)[:, None] & (i_group < n_groups)[None, :],
    )


def _part_maxima(
    centres: Tensor, rows: Tensor, groups: Tensor, group: int, part: int, valid: Tensor | None
) -> Tensor:
    """Score the rows of the given groups [n, g] again: the maximum of each part, [n, g * parts]."""
    n, m, d = len(centres), len(rows), rows.shape[1]
    n_parts = groups.shape[1] * (group // part)
    maxima = torch.empty(n, n_parts, device=rows.device, dtype=torch.float32)
    block_d = triton.next_power_of_2(d)
    block_rows = max(16, min(128, 8192 // block_d))
    parts_in_block = max(1, block_rows // part)
    grid = (n, triton.cdiv(n_parts, parts_in_block))
    _part_maxima_kernel[grid](
        centres,
        rows,
        rows if valid is None else valid,
        groups,
        maxima,
        m,
        d,
        n_parts,
        rows.stride(0),
        groups.shape[1],
        GROUP=group,
        PART=part,
        BLOCKS_IN_PART=max(1, part // block_rows),
        PART_IN_BLOCK=min(part, block_rows),
        BLOCK_ROWS=block_rows,
        BLOCK_D=block_d,
        MASKED=valid is not None,
        num_warps=4,
    )
    return maxima


@triton.jit
def _part_maxima_kernel(
    centres_ptr,  # [n, d]
    rows_ptr,  # [m, d]
    valid_ptr,  # [m], read when MASKED
    groups_ptr,  # [n, n_groups]
    maxima_ptr,  # [n, n_parts]
    m,
    d,
    n_parts,
    stride_row,
    n_groups,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    BLOCKS_IN_PART: tl.constexpr,
    PART_IN_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    PARTS_IN_BLOCK: tl.constexpr = BLOCK_ROWS // PART_IN_BLOCK
    PARTS_IN_GROUP: tl.constexpr = GROUP // PART
    bucket = tl.program_id(0).to(tl.int64)
    i_part = tl.program_id(1) * PARTS_IN_BLOCK + tl.arange(0, PARTS_IN_BLOCK)
    i_d = tl.arange(0, BLOCK_D)
    centre = tl.load(centres_ptr + bucket * d + i_d, mask=i_d < d, other=0.0).to(tl.float32)
    # The part that each row of the block belongs to, and with it the row.
    local = tl.arange(0, BLOCK_ROWS)
    its_part = tl.program_id(1) * PARTS_IN_BLOCK + local // PART_IN_BLOCK
    in_range = its_part < n_parts
    its_group = tl.load(
        groups_ptr + bucket * n_groups + its_part // PARTS_IN_GROUP, mask=in_range, other=0
    )
    first = its_group * GROUP + (its_part % PARTS_IN_GROUP) * PART + local % PART_IN_BLOCK
    best = tl.full((PARTS_IN_BLOCK,), float("-inf"), tl.float32)
    for step in range(BLOCKS_IN_PART):
        i_row = first + step * BLOCK_ROWS
        there = in_range & (i_row < m)
        rows = tl.load(
            rows_ptr + i_row[:, None] * stride_row + i_d[None, :],
            mask=there[:, None] & (i_d < d)[None, :],
            other=0.0,
        ).to(tl.float32)
        if MASKED:
            there = there & tl.load(valid_ptr + i_row, mask=there, other=0).to(tl.int1)
        scores = tl.sum(rows * centre[None, :], axis=1)
        scores = tl.where(scores == scores, scores, float("inf"))
        scores = tl.where(there, scores, float("-inf"))
        best = tl.maximum(best, tl.max(tl.reshape(scores, (PARTS_IN_BLOCK, PART_IN_BLOCK)), axis=1))
    tl.store(maxima_ptr + bucket * n_parts + i_part, best, mask=i_part < n_parts)
