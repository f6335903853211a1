"""The k largest of rows that are too long for a program to hold: read a few times instead.

A sample of the row says between which two values the k-th largest lies, almost surely. One pass
counts what is above and keeps what is between, few enough to hold and search; another pass writes.
Where the sample was wrong, or too many values are the same, the row is searched by digits of 8
bits: at most four passes more, and as many for the lowest numbers among equal values.
"""

import triton
import triton.language as tl

from sce.losses.kernels.keys import count_digits, kth_largest, number_of, ordered, take_digit


@triton.jit
def best_wide_kernel(
    values_ptr,  # [n, width] float32
    groups_ptr,  # [n, n_groups], read WITH_GROUPS
    best_ptr,  # [n, k]
    width,
    k,
    stride_best,
    n_groups,
    SAMPLE: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PART: tl.constexpr,
    WITH_GROUPS: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """Write the numbers of the k largest values of a row, as `best` does."""
    row = tl.program_id(0).to(tl.int64)
    values_ptr += row * width
    groups_ptr += row * n_groups
    best_ptr += row * stride_best
    least = -2147483648
    reach = 0
    above = 0
    if SAMPLE > 0:
        least, reach, above = _guess(values_ptr, best_ptr, width, k, SAMPLE, STAGES, BLOCK, DIGITS)
    if reach == 0:
        base, reach, above = _search(
            values_ptr, groups_ptr, width, k, least, False,
            STAGES, BLOCK, GROUP, INTERLEAVED, PART, WITH_GROUPS,
        )  # fmt: skip
        least = (base - 2147483648).to(tl.int32)
    if reach == k:
        _write(
            values_ptr, groups_ptr, best_ptr, width, k, least, 0, False,
            STAGES, BLOCK, GROUP, INTERLEAVED, PART, WITH_GROUPS,
        )  # fmt: skip
    else:  # not all that are equal to it have room
        base, reach, above = _search(
            values_ptr, groups_ptr, width, k - above, least, True,
            STAGES, BLOCK, GROUP, INTERLEAVED, PART, WITH_GROUPS,
        )  # fmt: skip
        _write(
            values_ptr, groups_ptr, best_ptr, width, k, least, (2147483648 - base).to(tl.int32),
            True, STAGES, BLOCK, GROUP, INTERLEAVED, PART, WITH_GROUPS,
        )  # fmt: skip


@triton.jit
def _guess(
    values_ptr,
    scratch_ptr,  # [k] int32
    width,
    k,
    SAMPLE: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """Search between two values that a sample of the row says the k-th largest lies between.

    Returns what `_search` does if it does lie there, and not too many others do; otherwise, that
    none reach it. What lies between waits in the place of the result.
    """
    j = tl.arange(0, SAMPLE)
    # Runs of 32 at equal distances: whole sectors of memory, all over the row.
    sample = ordered(values_ptr, (j // 32) * (width // SAMPLE) * 32 + j % 32, width)
    share = k / width
    middle = share * SAMPLE
    slack = 4.0 * tl.sqrt(middle * (1.0 - share)) + 2.0  # four standard deviations
    rank_high = (middle - slack).to(tl.int32)
    rank_low = (middle + slack).to(tl.int32)
    high = 2147483647
    if rank_high > 0:
        high = kth_largest(sample, rank_high, DIGITS)
    low = -2147483647
    if rank_low < SAMPLE:
        low = tl.maximum(low, kth_largest(sample, rank_low, DIGITS))
    above = 0
    between = 0
    for block in tl.range(0, tl.cdiv(width, BLOCK), num_stages=STAGES):
        keys = ordered(values_ptr, block * BLOCK + tl.arange(0, BLOCK), width)
        inside = (keys >= low) & (keys < high)
        at = between + tl.cumsum(inside.to(tl.int32), axis=0) - 1
        tl.store(scratch_ptr + at, keys, mask=inside & (at < k))
        counts = tl.sum((keys >= high).to(tl.int32) * 65536 + inside.to(tl.int32), axis=0)
        above += counts // 65536
        between += counts % 65536
    least = low
    reach = 0
    if (above < k) & (above + between >= k) & (between <= tl.minimum(k, SAMPLE)):
        tl.debug_barrier()
        sample = tl.load(scratch_ptr + j, mask=j < between, other=-2147483648)
        least = kth_largest(sample, k - above, DIGITS)
        reach = above + tl.sum((sample >= least).to(tl.int32), axis=0)
        above += tl.sum((sample > least).to(tl.int32), axis=0)
    return least, reach, above


@triton.jit
def _search(
    values_ptr,
    groups_ptr,
    width,
    k,
    least,
    BY_NUMBER: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PART: tl.constexpr,
    WITH_GROUPS: tl.constexpr,
):
    """Return a number that exactly k keys of a row reach, or the k-th largest key.

    With it goes how many keys reach it, and how many are larger if that is not k. The keys are the
    values, or, BY_NUMBER, how far the numbers of those equal to `least` are below 2³¹.
    """
    base = tl.full((), 0, tl.int64)
    blocks = tl.cdiv(width, BLOCK)
    reach = blocks * BLOCK
    above = 0
    shift = 24
    while (shift >= 0) & (reach != k):
        counts = tl.zeros((256,), tl.int32)
        for block in tl.range(0, blocks, num_stages=1 if BY_NUMBER else STAGES):
            column = block * BLOCK + tl.arange(0, BLOCK)
            keys = ordered(values_ptr, column, width)
            if BY_NUMBER:
                equal = keys == least
                number = number_of(column, equal, groups_ptr, GROUP, INTERLEAVED, PART, WITH_GROUPS)
                unsigned = tl.where(equal, 2147483648 - number.to(tl.uint32), 0)
            else:
                unsigned = keys.to(tl.uint32, bitcast=True) ^ 0x80000000
            counts += count_digits(unsigned, base, shift)
        base, reach, above = take_digit(counts, k, base, shift, reach, above)
        shift -= 8
    return base, reach, above


@triton.jit
def _write(
    values_ptr,
    groups_ptr,
    best_ptr,
    width,
    k,
    least,
    last,
    TIES: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PART: tl.constexpr,
    WITH_GROUPS: tl.constexpr,
):
    """Write the numbers of the keys that reach `least`; TIES: if equal, only those up to `last`."""
    i = tl.arange(0, BLOCK)
    written = 0
    for block in tl.range(0, tl.cdiv(width, BLOCK), num_stages=1 if TIES else STAGES):
        column = block * BLOCK + i
        keys = ordered(values_ptr, column, width)
        taken = (keys >= least) & (column < width)
        if TIES:
            equal = keys == least
            number = number_of(column, equal, groups_ptr, GROUP, INTERLEAVED, PART, WITH_GROUPS)
            taken = taken & ((keys > least) | (number <= last))
        order = written + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        written += tl.sum(taken.to(tl.int32), axis=0)
        tl.store(best_ptr + order, column, mask=taken)
    if WITH_GROUPS:
        tl.debug_barrier()
        for start in range(0, k, BLOCK):
            there = start + i < k
            column = tl.load(best_ptr + start + i, mask=there, other=0)
            number = number_of(column, there, groups_ptr, GROUP, INTERLEAVED, PART, WITH_GROUPS)
            tl.store(best_ptr + start + i, number, mask=there)
