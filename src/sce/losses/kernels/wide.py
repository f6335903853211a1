"""The k largest of rows that are too long for a program to hold: many programs to a row.

A sample of the row says between which two values the k-th largest lies, almost surely. Programs for
all chunks of the row count what is above and what is between; knowing the counts of the chunks
before theirs, they write the numbers of what is above, in order, and the columns of what is between
as candidates. One program then takes the best of these.

Where the sample was wrong, or too many values lie between, that program searches the whole row
instead, by digits of 8 bits: at most four passes, as many for the lowest numbers among equal
values, and one that writes. Nobody but the device knows, and no place depends on what is faster.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sce.losses.kernels.keys import kth_largest, number_of, ordered, write_largest
from sce.losses.kernels.launch import ceil_div, launch, power_of_2

SAMPLE = 1 << 13  # of values of a row
DEVIATIONS = 4.25  # standard deviations that are allowed for: one row in 50,000 is outside
MAX_CANDIDATES = 1 << 14  # that a program holds
BLOCK = 1 << 11  # values that a program looks at at once; less than 2¹⁵
BLOCK_ALONE = 1 << 13  # and if it is the only one for a row
MAX_CHUNKS = 1 << 8  # of a row


def best_wide(
    values: Tensor,  # [n, width] float32
    groups: Tensor,  # [n, n_groups], read if GROUP is not 0
    out: Tensor,  # [n, k]
    width: int,
    k: int,
    stride: int,  # of the rows of `out`
    n_groups: int,
    numbering: dict[str, int | bool],
) -> None:
    """Write the numbers of the k largest values of each row, as `best` does."""
    n = len(out)
    rank_high, rank_low, capacity = bracket(width, k)
    blocks = ceil_div(ceil_div(width, BLOCK), MAX_CHUNKS)  # of a chunk
    chunks = ceil_div(width, blocks * BLOCK)
    brackets = torch.empty(n, 2, device=out.device, dtype=torch.int32)
    counts = torch.empty(n, chunks, device=out.device, dtype=torch.int64)
    candidates = torch.empty(n, capacity, device=out.device, dtype=torch.int32)
    launch(
        _bracket_kernel, (2 * n,), values, brackets, width, rank_high, rank_low,
        SAMPLE=SAMPLE, num_warps=8,
    )  # fmt: skip
    launch(
        _count_kernel, (n * chunks,), values, brackets, counts, width, chunks, blocks,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    arguments = (
        values, groups, out, width, k, stride, n_groups,
        brackets, counts, candidates, chunks,
    )  # fmt: skip
    launch(
        _part_kernel, (n * chunks,), *arguments, blocks,
        CAPACITY=capacity, MAX_CHUNKS=MAX_CHUNKS, BLOCK=BLOCK, num_warps=4, **numbering,
    )  # fmt: skip
    launch(
        _finish_kernel, (n,), *arguments,
        CAPACITY=capacity, MAX_CHUNKS=MAX_CHUNKS, BLOCK=BLOCK_ALONE, num_warps=16, **numbering,
    )  # fmt: skip


def bracket(width: int, k: int) -> tuple[int, int, int]:
    """Return two ranks in a sample between which a row's k-th value lies, and a capacity.

    The sample's share of values above the k-th spreads like a binomial, and what lies between two
    of its ranks like a sum of as many waiting times.
    """
    share = k / width
    slack = DEVIATIONS * math.sqrt(SAMPLE * share * (1 - share)) + 2
    high = max(0, math.floor(SAMPLE * share - slack))
    low = min(SAMPLE + 1, math.ceil(SAMPLE * share + slack))  # beyond the sample: all that is there
    between = low - high
    capacity = (between + DEVIATIONS * math.sqrt(between)) * width / SAMPLE
    return high, low, min(MAX_CANDIDATES, power_of_2(math.ceil(capacity)))


@triton.jit(do_not_specialize=["rank_high", "rank_low"])
def _bracket_kernel(
    values_ptr,  # [n, width] float32
    brackets_ptr,  # [n, 2]: what is above all that lies between, and the least that does
    width, rank_high, rank_low,
    SAMPLE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // 2).to(tl.int64)
    is_low = tl.program_id(0) % 2 == 1
    j = tl.arange(0, SAMPLE).to(tl.int64)
    # One from each of as many stretches, by the golden section: whatever repeats in the row.
    column = (j * SAMPLE + j * 5063 % SAMPLE) * width // (SAMPLE * SAMPLE)
    keys = ordered(values_ptr + row * width, column.to(tl.int32), width)
    rank = tl.where(is_low, rank_low, rank_high)
    found = kth_largest(keys, rank, -2147483647, 2147483646)
    tl.store(brackets_ptr + tl.program_id(0), tl.where(is_low, found, found + 1))


@triton.jit
def _count_kernel(
    values_ptr,  # [n, width] float32
    brackets_ptr,  # [n, 2]
    counts_ptr,  # [n, chunks] int64: how many are above, times 2³², and how many between
    width, chunks, blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    values_ptr += row * width
    high = tl.load(brackets_ptr + 2 * row)
    low = tl.load(brackets_ptr + 2 * row + 1)
    counts = tl.full((), 0, tl.int64)
    for block in range(chunk * blocks, chunk * blocks + blocks):
        keys = ordered(values_ptr, block * BLOCK + tl.arange(0, BLOCK), width)
        its = tl.sum(_sides(keys, low, high), axis=0).to(tl.int64)
        counts += (its >> 16 << 32) + (its & 65535)
    tl.store(counts_ptr + tl.program_id(0), counts)


@triton.jit
def _sides(keys, low, high):
    """Return 2¹⁶ for what is above, and 1 for what is between."""
    return tl.where(keys >= high, 65536, (keys >= low).to(tl.int32))


@triton.jit
def _counted(counts_ptr, end, MAX_CHUNKS: tl.constexpr):
    """Return how many values of the chunks up to an end are above, and how many between."""
    i = tl.arange(0, MAX_CHUNKS)
    counts = tl.sum(tl.load(counts_ptr + i, mask=i < end, other=0), axis=0)
    return (counts >> 32).to(tl.int32), (counts & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _fits(above, between, k, CAPACITY: tl.constexpr):
    """True if the k-th largest is a candidate, and all candidates fit."""
    return (above < k) & (above + between >= k) & (between <= CAPACITY)


@triton.jit
def _part_kernel(
    values_ptr,  # [n, width] float32
    groups_ptr,  # [n, n_groups], read if GROUP is not 0
    best_ptr,  # [n, k]
    width, k, stride_best, n_groups,
    brackets_ptr,  # [n, 2]
    counts_ptr,  # [n, chunks]
    candidates_ptr,  # [n, CAPACITY]: the columns of what is between
    chunks, blocks,
    CAPACITY: tl.constexpr, MAX_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    INTERLEAVED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    values_ptr += row * width
    groups_ptr += row * n_groups
    best_ptr += row * stride_best
    counts_ptr += row * chunks
    candidates_ptr += row * CAPACITY
    high = tl.load(brackets_ptr + 2 * row)
    low = tl.load(brackets_ptr + 2 * row + 1)
    above, between = _counted(counts_ptr, chunks, MAX_CHUNKS)
    if _fits(above, between, k, CAPACITY):
        above, between = _counted(counts_ptr, chunk, MAX_CHUNKS)
        for block in range(chunk * blocks, chunk * blocks + blocks):
            column = block * BLOCK + tl.arange(0, BLOCK)
            keys = ordered(values_ptr, column, width)
            sides = _sides(keys, low, high)
            before = tl.cumsum(sides, axis=0) - sides
            first = keys >= high
            number = number_of(column, first, groups_ptr, GROUP, INTERLEAVED, PART)
            candidate = candidates_ptr + between + (before & 65535)
            place = tl.where(first, best_ptr + above + (before >> 16), candidate)
            tl.store(place, tl.where(first, number, column), mask=keys >= low)
            counts = tl.sum(sides, axis=0)
            above += counts >> 16
            between += counts & 65535


@triton.jit
def _finish_kernel(
    values_ptr,  # [n, width] float32
    groups_ptr,  # [n, n_groups], read if GROUP is not 0
    best_ptr,  # [n, k]
    width, k, stride_best, n_groups,
    brackets_ptr,  # [n, 2]
    counts_ptr,  # [n, chunks]
    candidates_ptr,  # [n, CAPACITY]
    chunks,
    CAPACITY: tl.constexpr, MAX_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    INTERLEAVED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    values_ptr += row * width
    groups_ptr += row * n_groups
    best_ptr += row * stride_best
    above, between = _counted(counts_ptr + row * chunks, chunks, MAX_CHUNKS)
    if _fits(above, between, k, CAPACITY):
        high = tl.load(brackets_ptr + 2 * row)
        low = tl.load(brackets_ptr + 2 * row + 1)
        j = tl.arange(0, CAPACITY)
        mask = j < between
        column = tl.load(candidates_ptr + row * CAPACITY + j, mask=mask, other=width)
        keys = ordered(values_ptr, column, width)
        number = number_of(column, mask, groups_ptr, GROUP, INTERLEAVED, PART)
        write_largest(best_ptr + above, keys, number, k - above, low, high)
    else:
        base, reach, above = _search(
            values_ptr, groups_ptr, width, k, 0, False,
            BLOCK, GROUP, INTERLEAVED, PART,
        )  # fmt: skip
        least = (base - 2147483648).to(tl.int32)
        last = 2147483647
        if reach != k:  # not all that are equal to it fit
            base, reach, above = _search(
                values_ptr, groups_ptr, width, k - above, least, True,
                BLOCK, GROUP, INTERLEAVED, PART,
            )  # fmt: skip
            last = (2147483648 - base).to(tl.int32)
        written = 0
        for block in range(tl.cdiv(width, BLOCK)):
            column = block * BLOCK + tl.arange(0, BLOCK)
            keys = ordered(values_ptr, column, width)
            taken = keys >= least  # which is above what is not there
            number = number_of(column, taken, groups_ptr, GROUP, INTERLEAVED, PART)
            taken = taken & ((keys > least) | (number <= last))
            order = written + tl.cumsum(taken.to(tl.int32), axis=0) - 1
            tl.store(best_ptr + order, number, mask=taken)
            written += tl.sum(taken.to(tl.int32), axis=0)


@triton.jit
def _search(
    values_ptr, groups_ptr, width, k, least,
    BY_NUMBER: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, INTERLEAVED: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Return a number that exactly k keys of a row reach, or the k-th largest key.

    With it goes how many keys reach it, and how many are larger if that is not k. The keys are the
    values, or, BY_NUMBER, how far the numbers of those equal to `least` are below 2³¹.
    """
    i = tl.arange(0, 256)
    base = tl.full((), 0, tl.int64)
    blocks = tl.cdiv(width, BLOCK)
    reach = blocks * BLOCK
    above = 0
    shift = 24
    while (shift >= 0) & (reach != k):
        # Count the keys by what follows the base; what is below counts as the lowest digit.
        start = base.to(tl.uint32)
        counts = tl.zeros((256,), tl.int32)
        for block in range(blocks):
            column = block * BLOCK + tl.arange(0, BLOCK)
            keys = ordered(values_ptr, column, width)
            if BY_NUMBER:
                equal = keys == least
                number = number_of(column, equal, groups_ptr, GROUP, INTERLEAVED, PART)
                unsigned = tl.where(equal, 2147483648 - number.to(tl.uint32), 0)
            else:
                unsigned = keys.to(tl.uint32, bitcast=True) ^ 0x80000000
            digit = tl.minimum((unsigned - start) >> tl.cast(shift, tl.uint32), 255)
            counts += tl.histogram(tl.where(unsigned < start, 0, digit).to(tl.int32), 256)
        # Take the largest digit that k keys reach.
        reached = tl.cumsum(counts, axis=0, reverse=True)
        taken = tl.max(tl.where(reached >= k, i, 0), axis=0)
        # The lowest digit is not counted alone, nor is the highest.
        reach = tl.where(taken > 0, tl.sum(tl.where(i == taken, reached, 0), axis=0), reach)
        above = tl.where(taken < 255, tl.sum(tl.where(i == taken + 1, reached, 0), axis=0), above)
        base += taken.to(tl.int64) << shift
        shift -= 8
    return base, reach, above
