"""Numbers as integers of the same order, and the k largest of as many as a program holds."""

import triton
import triton.language as tl

from sce.losses.kernels.groups import rows_of


@triton.jit
def ordered(ptr, i, width):
    """Load float32 numbers as integers of the same order; behind the row, the lowest integer."""
    value = tl.load(ptr + i, mask=i < width, other=0.0)
    value = tl.where(value == value, value, float("inf"))
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # no negative zero: it equals zero
    return tl.where(i < width, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -2147483648)


@triton.jit
def number_of(
    column, mask, groups_ptr, GROUP: tl.constexpr, INTERLEAVED: tl.constexpr, PART: tl.constexpr
):
    """Return the numbers of the rows or parts that columns stand for: without groups their own."""
    number = column
    if GROUP > 0:
        PARTS: tl.constexpr = GROUP // PART
        group = tl.load(groups_ptr + column // PARTS, mask=mask, other=0)
        if PART == 1:
            number = rows_of(group, column % PARTS, GROUP, INTERLEAVED).to(tl.int32)
        elif INTERLEAVED:
            number = ((group // 4) * PARTS + column % PARTS) * 4 + group % 4
        else:
            number = group * PARTS + column % PARTS
    return number


@triton.jit
def kth_largest(keys, k, low, high):
    """Return a number that exactly k keys reach, or, if there is none, the k-th largest key.

    At least k keys must reach `low`, and fewer `high`.
    """
    low, high = tl.cast(low, tl.int32), tl.cast(high, tl.int32)  # which may be constants
    reach = k + 1
    while (reach != k) & (low + 1 < high):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # their sum would overflow
        reach = tl.sum((keys >= middle).to(tl.int32), axis=0)
        high = tl.where(reach < k, middle, high)
        low = tl.where(reach < k, low, middle)
    return low


@triton.jit
def write_largest(ptr, keys, number, k, low, high):
    """Write the numbers of the k largest keys, the lowest of equal ones; all of it as above."""
    least = kth_largest(keys, k, low, high)
    equal = keys == least
    left = k - tl.sum((keys > least).to(tl.int32), axis=0)
    last = 2147483647
    if tl.sum(equal.to(tl.int32), axis=0) > left:
        below = tl.where(equal, -number, -2147483648)
        last = -kth_largest(below, left, -tl.max(number, axis=0), 1)
    taken = (keys > least) | (equal & (number <= last))
    tl.store(ptr + tl.cumsum(taken.to(tl.int32), axis=0) - 1, number, mask=taken)
