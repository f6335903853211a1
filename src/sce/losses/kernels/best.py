"""The k largest of each row of numbers, wherever they are: exact, and the same in every run."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sce.losses.kernels.groups import Cut, rows_of
from sce.losses.kernels.launch import ceil_div, launch, power_of_2

# The most values of a row that one program of the selection holds.
MAX_WIDTH = 1 << 14
# Longer rows are first reduced to the maxima of as many folds, if the best ones are then fewer.
FOLDED_WIDTH = 1 << 12
MAX_FOLDED = 1 << 15


def best(
    values: Tensor,
    width: int,
    k: int,
    out: Tensor,  # [n, k]
    groups: Tensor | None = None,
    cut: Cut | None = None,
) -> None:
    """Write the columns of each row's k largest values; ties go to the lower one.

    With `groups` [n, g], each of which was cut into parts, a column each, write the number of the
    part (the row, where a part is one) instead of the column.
    """
    n = len(out)
    cut = cut or Cut(2, 1, False)  # not used without groups
    arguments = (values, out if groups is None else groups, out, width, k, out.stride(0))
    n_groups = 0 if groups is None else groups.shape[1]
    numbering = {
        "GROUP": cut.group,
        "INTERLEAVED": cut.interleaved,
        "PART": cut.part,
        "WITH_GROUPS": groups is not None,
    }
    fold = power_of_2(ceil_div(width, FOLDED_WIDTH))
    while fold > 1:
        # Folds interleave as groups do.
        taken = k + (8 if groups is None else 8 + 3 * max(1, cut.group // cut.part // fold))
        block_folds, block = power_of_2(ceil_div(width, fold)), power_of_2(taken * fold)
        if 2 * taken * fold <= width and max(block_folds, block) <= MAX_FOLDED:
            folds = torch.empty(n, taken, device=values.device, dtype=torch.int32)
            launch(
                _best_folded_kernel, (n,),
                *arguments, n_groups, folds, taken,
                FOLD=fold, BLOCK_FOLDS=block_folds, BLOCK=block,
                num_warps=16 if max(block_folds, block) > 8192 else 8, **numbering,
            )  # fmt: skip
            return
        fold //= 2
    block = min(MAX_WIDTH, power_of_2(width))
    launch(
        _best_kernel, (n,),
        *arguments, n_groups, BLOCKS=ceil_div(width, block), BLOCK=block,
        num_warps=16 if block > 8192 else 8 if block > 2048 else 4, **numbering,
    )  # fmt: skip


@triton.jit
def _ordered(ptr, i, width):
    """Load float32 numbers as integers of the same order, below all of them what is not there."""
    value = tl.load(ptr + i, mask=i < width, other=0.0)
    value = tl.where(value == value, value, float("inf"))
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # no negative zero: it equals zero
    return tl.where(i < width, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -2147483648)


@triton.jit
def _number(
    column,
    width,
    groups_ptr,
    GROUP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PART: tl.constexpr,
    WITH_GROUPS: tl.constexpr,
):
    """Return what a column stands for."""
    number = column
    if WITH_GROUPS:
        PARTS: tl.constexpr = GROUP // PART
        group = tl.load(groups_ptr + column // PARTS, mask=column < width, other=0)
        if PART == 1:
            number = rows_of(group, column % PARTS, GROUP, INTERLEAVED).to(tl.int32)
        elif INTERLEAVED:
            number = ((group // 4) * PARTS + column % PARTS) * 4 + group % 4
        else:
            number = group * PARTS + column % PARTS
    return number


@triton.jit
def _kth_largest(keys, k):
    """Return a number that exactly k keys reach, or, if there is none, the k-th largest key."""
    least = -2147483648
    reach = k + 1
    bit = 31
    while (bit >= 0) & (reach != k):  # bit by bit from the top
        tried = tl.where(bit == 31, 0, least + (1 << (bit & 31)))
        reach = tl.sum((keys >= tried).to(tl.int32), axis=0)
        least = tl.where(reach >= k, tried, least)
        bit -= 1
    return least


@triton.jit
def _lowest(equal, number, room):
    """Return the number up to which `room` of the equal ones are taken, lowest first."""
    last = 2147483647
    if tl.sum(equal.to(tl.int32), axis=0) > room:
        below = -1  # the largest number that fewer of them than there is room for reach down to
        for bit in range(31):
            tried = below + (1 << (30 - bit))
            reach = tl.sum((equal & (number <= tried)).to(tl.int32), axis=0)
            below = tl.where(reach < room, tried, below)
        last = below + 1
    return last


@triton.jit
def _best_folded_kernel(
    values_ptr,  # [n, width] float32
    groups_ptr,  # [n, n_groups], read WITH_GROUPS
    best_ptr,  # [n, k]
    width,
    k,
    stride_best,
    n_groups,
    folds_ptr,  # [n, n_folds]: the best folds, which hold the best values
    n_folds,
    FOLD: tl.constexpr,
    BLOCK_FOLDS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PART: tl.constexpr,
    WITH_GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    values_ptr += row * width
    groups_ptr += row * n_groups
    folds_ptr += row * n_folds
    i = tl.arange(0, BLOCK_FOLDS)
    keys = _ordered(values_ptr, i * FOLD, width)
    for part in tl.static_range(1, FOLD):
        keys = tl.maximum(keys, _ordered(values_ptr, i * FOLD + part, width))
    least = _kth_largest(keys, n_folds)
    equal = keys == least
    last = _lowest(equal, i, n_folds - tl.sum((keys > least).to(tl.int32), axis=0))
    taken = (keys > least) | (equal & (i <= last))
    tl.store(folds_ptr + tl.cumsum(taken.to(tl.int32), axis=0) - 1, i, mask=taken)
    tl.debug_barrier()
    j = tl.arange(0, BLOCK)
    there = j < n_folds * FOLD
    column = tl.load(folds_ptr + j // FOLD, mask=there, other=0) * FOLD + j % FOLD
    there = there & (column < width)
    keys = tl.where(there, _ordered(values_ptr, column, width), -2147483648)
    number = _number(column, width, groups_ptr, GROUP, INTERLEAVED, PART, WITH_GROUPS)
    least = _kth_largest(keys, k)
    equal = there & (keys == least)
    last = _lowest(equal, number, k - tl.sum((keys > least).to(tl.int32), axis=0))
    taken = there & ((keys > least) | (equal & (number <= last)))
    order = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    tl.store(best_ptr + row * stride_best + order, number, mask=taken)


@triton.jit
def _best_kernel(
    values_ptr,  # [n, width] float32
    groups_ptr,  # [n, n_groups], read WITH_GROUPS
    best_ptr,  # [n, k]
    width,
    k,
    stride_best,
    n_groups,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PART: tl.constexpr,
    WITH_GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    values_ptr += row * width
    groups_ptr += row * n_groups
    best_ptr += row * stride_best
    i = tl.arange(0, BLOCK)
    if BLOCKS == 1:
        keys = _ordered(values_ptr, i, width)
        number = _number(i, width, groups_ptr, GROUP, INTERLEAVED, PART, WITH_GROUPS)
        least = _kth_largest(keys, k)
        equal = (i < width) & (keys == least)
        last = _lowest(equal, number, k - tl.sum((keys > least).to(tl.int32), axis=0))
        taken = (i < width) & ((keys > least) | (equal & (number <= last)))
        tl.store(best_ptr + tl.cumsum(taken.to(tl.int32), axis=0) - 1, number, mask=taken)
    else:
        # The same, with the row read again at each step.
        least = -2147483648
        reach = k + 1
        bit = 31
        while (bit >= 0) & (reach != k):
            tried = tl.where(bit == 31, 0, least + (1 << (bit & 31)))
            counts = tl.zeros((BLOCK,), tl.int32)  # of each thread: they meet once a step
            for block in range(BLOCKS):
                keys = _ordered(values_ptr, block * BLOCK + i, width)
                counts += (keys >= tried).to(tl.int32)
            reach = tl.sum(counts, axis=0)
            least = tl.where(reach >= k, tried, least)
            bit -= 1
        above = 0
        equal = 0
        for block in range(BLOCKS):
            keys = _ordered(values_ptr, block * BLOCK + i, width)
            above += tl.sum((keys > least).to(tl.int32), axis=0)
            equal += tl.sum((keys == least).to(tl.int32), axis=0)
        last = 2147483647
        if equal > k - above:
            below = -1
            for step in range(31):
                tried = below + (1 << (30 - step))
                reach = 0
                for block in range(BLOCKS):
                    column = block * BLOCK + i
                    keys = _ordered(values_ptr, column, width)
                    number = _number(
                        column, width, groups_ptr, GROUP, INTERLEAVED, PART, WITH_GROUPS
                    )
                    reach += tl.sum(((keys == least) & (number <= tried)).to(tl.int32), axis=0)
                below = tl.where(reach < k - above, tried, below)
            last = below + 1
        written = 0
        for block in range(BLOCKS):
            column = block * BLOCK + i
            keys = _ordered(values_ptr, column, width)
            number = _number(column, width, groups_ptr, GROUP, INTERLEAVED, PART, WITH_GROUPS)
            taken = (keys > least) | ((keys == least) & (number <= last))
            taken = taken & (column < width)
            order = written + tl.cumsum(taken.to(tl.int32), axis=0) - 1
            written += tl.sum(taken.to(tl.int32), axis=0)
            tl.store(best_ptr + order, number, mask=taken)
